"""Whether drift lets Muon and Lion train behind a sparse exchange: a plan of the race's trainings, and its verdict."""
