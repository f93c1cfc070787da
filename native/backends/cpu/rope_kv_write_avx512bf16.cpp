// The kernels of rope_kv_write.cpp for processors that round fp32 to bf16 in one instruction.
#include "rope_kv_write.cpp"
