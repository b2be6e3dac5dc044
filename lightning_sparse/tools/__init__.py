"""Programs around a training: advice before it, comparison of methods, reports of runs. Nothing imports them."""
