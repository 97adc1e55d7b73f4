# Decides whether to build the CUDA kernels, prints the decision, and defines the target shoestring_cuda if
# they are built. Sets SHOESTRING_CUDA_JSON (the CUDA toolkit's version in quotes, or null) and
# SHOESTRING_CUDA_NOTE (the reason why the kernels are not built, or empty), and SHOESTRING_GPUS_JSON (the GPUs that
# the kernels are built for, as a JSON list).
set(SHOESTRING_CUDA_JSON null)
set(SHOESTRING_GPUS_JSON "[]")
set(SHOESTRING_CUDA_NOTE "")
if(DEFINED ENV{SHOESTRING_CUDA})
  set(SHOESTRING_CUDA "$ENV{SHOESTRING_CUDA}")
endif()
if(NOT SHOESTRING_CUDA MATCHES "^(0|1|auto)$")
  message(FATAL_ERROR "SHOESTRING_CUDA: expected 0, 1 or auto, received '${SHOESTRING_CUDA}'")
endif()

if(SHOESTRING_CUDA STREQUAL "0")
  set(SHOESTRING_CUDA_NOTE "switched off with SHOESTRING_CUDA=0")
elseif(NOT LibTorch_CUDA)
  set(SHOESTRING_CUDA_NOTE "this LibTorch has no CUDA")
else()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(SHOESTRING_CUDA_NOTE "no nvcc was found")
  endif()
endif()

if(SHOESTRING_CUDA_NOTE)
  if(SHOESTRING_CUDA STREQUAL "1")
    message(FATAL_ERROR "SHOESTRING_CUDA=1, but ${SHOESTRING_CUDA_NOTE}: put nvcc into PATH and install a PyTorch with "
      "CUDA, or leave SHOESTRING_CUDA out")
  endif()
  message(STATUS "CUDA kernels: not built (${SHOESTRING_CUDA_NOTE})")
  return()
endif()

# The GPUs that get machine code, as numbers of their architecture. `wheel` is every GPU that people train on, and
# PTX that the driver compiles for newer ones. `gates` is one for each kind of kernel, for scripts/check_ptxas.py.
set(_wheel 75 80 86 89 90a 100 120 ptx)
set(_gates 75 80 90a)
set(SHOESTRING_CUDA_ARCHITECTURES "wheel" CACHE STRING "GPUs to build kernels for: wheel, gates, or a list such as 80;90a;ptx")
set(SHOESTRING_GPUS ${SHOESTRING_CUDA_ARCHITECTURES})
if(SHOESTRING_CUDA_ARCHITECTURES MATCHES "^(wheel|gates)$")
  set(SHOESTRING_GPUS ${_${SHOESTRING_CUDA_ARCHITECTURES}})
endif()
# CMake's own names for architectures are accepted as well: 80-real, and 80-virtual for PTX.
list(TRANSFORM SHOESTRING_GPUS REPLACE "-real$" "")
list(TRANSFORM SHOESTRING_GPUS REPLACE "^80-virtual$" "ptx")
set(CMAKE_CUDA_ARCHITECTURES OFF)  # the options below are shorter than what CMake would pass
set(_from_compute_80 "")
set(_code "")
foreach(_gpu IN LISTS SHOESTRING_GPUS)
  if(_gpu STREQUAL "ptx")
    list(APPEND _from_compute_80 compute_80)
  elseif(NOT _gpu MATCHES "^[0-9]+a?$")
    message(FATAL_ERROR "SHOESTRING_CUDA_ARCHITECTURES: expected wheel, gates, or a list of numbers and ptx such as "
      "80;90a;ptx, received '${SHOESTRING_CUDA_ARCHITECTURES}'")
  elseif(_gpu LESS 80)
    list(APPEND _code --generate-code=arch=compute_${_gpu},code=[sm_${_gpu}])
  else()
    string(REGEX REPLACE "a$" "" _gpu ${_gpu})
    list(APPEND _from_compute_80 sm_${_gpu})
  endif()
endforeach()
# Apart from those for Hopper, kernels have the same source on all GPUs from sm_80 on, so one PTX serves all of them.
# Compiling CUDA C++ for each would take 1.5 times as long. Only kernels for Hopper need the "a" of sm_90a.
if(_from_compute_80)
  list(JOIN _from_compute_80 "," _from_compute_80)
  list(APPEND _code --generate-code=arch=compute_80,code=[${_from_compute_80}])
endif()

enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(_compress "")
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 13)
  set(_compress --compress-mode=size)  # a fifth of the size; drivers older than CUDA 12 may not read it
endif()
set(SHOESTRING_CUDA_JSON "\"${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}\"")
list(JOIN SHOESTRING_GPUS "\", \"" SHOESTRING_GPUS_JSON)
set(SHOESTRING_GPUS_JSON "[\"${SHOESTRING_GPUS_JSON}\"]")
message(STATUS "CUDA kernels: toolkit ${CUDAToolkit_VERSION}, GPUs ${SHOESTRING_GPUS}")

# Compiles the CUDA sources of a target with these options, which select GPUs.
function(shoestring_cuda_code target)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${ARGN};${_compress}>")
endfunction()

# CUDA kernels include no PyTorch header, so they compile quickly, and the CUDA emulator of the tests can
# compile the same files for the CPU. *_hopper.cu files are compiled for sm_90a only, because other GPUs lack
# its instructions. Host code launches the kernels in *_hopper.cu files only on such a GPU, but refers to them in
# every build.
file(GLOB _kernels CONFIGURE_DEPENDS cuda/*/*.cu)
set(_hopper ${_kernels})
list(FILTER _hopper INCLUDE REGEX "_hopper\\.cu$")
list(FILTER _kernels EXCLUDE REGEX "_hopper\\.cu$")
add_library(shoestring_kernels OBJECT ${_kernels})
add_library(shoestring_hopper_kernels OBJECT ${_hopper})
set(_launcher sh ${PROJECT_SOURCE_DIR}/cmake/keep_ptxas.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
foreach(_target shoestring_kernels shoestring_hopper_kernels)
  target_include_directories(${_target} PRIVATE . csrc csrc/include)
  # With -v, ptxas prints the registers, shared memory and register spills of each kernel. The compiler
  # launcher keep_ptxas.sh writes this output next to each object file for scripts/check_ptxas.py.
  target_compile_options(${_target} PRIVATE -Xptxas -v)
  set_target_properties(${_target} PROPERTIES CUDA_STANDARD 17 CUDA_COMPILER_LAUNCHER "${_launcher}")
  target_link_libraries(${_target} PRIVATE CUDA::cudart)
endforeach()
shoestring_cuda_code(shoestring_kernels ${_code})
shoestring_cuda_code(shoestring_hopper_kernels --generate-code=arch=compute_90a,code=[sm_90a])

add_library(shoestring_cuda SHARED cuda/core/runtime.cpp $<TARGET_OBJECTS:shoestring_kernels>
            $<TARGET_OBJECTS:shoestring_hopper_kernels>)
target_include_directories(shoestring_cuda PRIVATE csrc)
target_link_libraries(shoestring_cuda PUBLIC shoestring shoestring::torch_cuda PRIVATE CUDA::cudart)
# Process groups over NCCL. libtorch_cuda.so contains them where LibTorch was built with NCCL; nccl.h is part of
# PyPI's package of NCCL, which PyTorch requires.
set(_nccl "")
set(_caffe2 "${LibTorch_DIR}/share/cmake/Caffe2/Caffe2Targets.cmake")
if(EXISTS "${_caffe2}")
  file(STRINGS "${_caffe2}" _nccl REGEX "USE_C10D_NCCL")
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS "${LibTorch_DIR}/../nvidia/nccl/include")
if(_nccl AND NCCL_INCLUDE_DIR)
  target_sources(shoestring_cuda PRIVATE cuda/distributed/nccl.cpp)
  set_source_files_properties(cuda/distributed/nccl.cpp PROPERTIES COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_NCCL")
  target_include_directories(shoestring_cuda SYSTEM PRIVATE "${NCCL_INCLUDE_DIR}")
else()
  message(STATUS "C++ programs cannot connect processes by NCCL: nccl.h was not found, or LibTorch was built without NCCL")
endif()
# CMake 3.25 does not know C++20 for nvcc. The target shoestring_cuda compiles no CUDA source itself, but
# CMake's Makefile generator checks its CUDA standard nevertheless.
set_target_properties(shoestring_cuda PROPERTIES CUDA_STANDARD 17)
