"""Opening trained models up: each module computes one finding and returns plain arrays; `plots` alone draws."""
