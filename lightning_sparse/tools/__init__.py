"""Programs around a training: advice before it, comparison of methods, reports of runs. No other part imports them."""
