# surogate_find_nvcc(): nvcc where CMake looks for it, and where NVIDIA's installers put it. cmake/build_backend.py looks in
# the same places.
function(surogate_find_nvcc)
  if(CMAKE_CUDA_COMPILER OR NOT "$ENV{CUDACXX}" STREQUAL "")
    return()
  endif()
  find_program(SUROGATE_NVCC nvcc HINTS "$ENV{CUDA_PATH}/bin" PATHS /usr/local/cuda/bin)
  mark_as_advanced(SUROGATE_NVCC)
  if(SUROGATE_NVCC)
    set(CMAKE_CUDA_COMPILER "${SUROGATE_NVCC}" PARENT_SCOPE)
  endif()
endfunction()

# surogate_nvcc_version(<variable> <nvcc>): "13.0".
function(surogate_nvcc_version variable nvcc)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" found "${text}")
  set(${variable} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# surogate_cuda_architectures(<variable> <asked>): what to build for. "native" stands for the devices of this machine, or
# for Hopper where there is none. From 9.0 on the kernels want instructions of one architecture alone, hence the "a", which
# CMake's own "native" leaves out.
function(surogate_cuda_architectures variable asked)
  if(NOT asked STREQUAL "native")
    set(${variable} "${asked}" PARENT_SCOPE)
    return()
  endif()
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capabilities OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE result)
  set(found "")
  if(result EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" number "${capability}")
      if(number GREATER_EQUAL 90)
        list(APPEND found "${number}a-real")
      elseif(number GREATER_EQUAL 80)
        list(APPEND found "${number}-real")
      endif()
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  if(NOT found)
    set(found "90a-real")
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()
