"""Programs that measure, each run by `python -m recipes.benchmarks.NAME`:

attention (speed and memory), peers (implementations by others beside ours), flurka (whole layers against both parents),
error (on real activations), tasks (search and images), kernel (evaluations of the approximate kernel product).
"""
