"""What uncertainty costs, measured: every ratio from repeats in turn, by medians, in one run.

==============  ====================================================================================
command         ``lpbnn bench``: what can be measured, and the options of each
networks        whole networks: training step, prediction, memory, parameters, compile time
deeplab         the paper's runtime table (Table 3), with its numbers beside ours
draws           many draws of every member: throughput per member against plain inference
layers          one convolution
paper           the same on paper: operations and bytes, from the shapes of a network
==============  ====================================================================================
"""
