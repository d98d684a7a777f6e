"""Tools around training: memory, advice, scaling, the doctor, inspection, bisection."""
