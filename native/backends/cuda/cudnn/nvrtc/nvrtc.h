// The names of NVRTC that the headers of the cuDNN frontend mention. Engines of the frontend that compile CUDA source
// at run time use them; ours never asks for those engines, and nothing here is linked. It spares whoever builds
// Surogate the NVRTC wheel.
#pragma once

typedef enum { NVRTC_SUCCESS = 0, NVRTC_ERROR_INTERNAL_ERROR = 11 } nvrtcResult;
typedef struct _nvrtcProgram *nvrtcProgram;
