// The kernels of dropout.cpp for processors that round fp32 to bf16 in one instruction.
#include "dropout.cpp"
