// The kernels of rms_norm.cpp for processors that round fp32 to bf16 in one instruction.
#include "rms_norm.cpp"
