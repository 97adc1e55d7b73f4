# Decides whether to build the CUDA kernels, prints the decision, and defines the target shoestring_cuda if
# they are built. Sets SHOESTRING_CUDA_JSON (the CUDA toolkit's version in quotes, or null) and
# SHOESTRING_CUDA_NOTE (the reason why the kernels are not built, or empty).
set(SHOESTRING_CUDA_JSON null)
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

# Build machine code for sm_75, sm_80 and sm_90a, and PTX that the driver compiles for newer GPUs.
set(SHOESTRING_CUDA_ARCHITECTURES "75-real;80-real;90a-real;80-virtual" CACHE STRING "As CMAKE_CUDA_ARCHITECTURES")
set(CMAKE_CUDA_ARCHITECTURES ${SHOESTRING_CUDA_ARCHITECTURES})
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(SHOESTRING_CUDA_JSON "\"${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}\"")
message(STATUS "CUDA kernels: toolkit ${CUDAToolkit_VERSION}, architectures ${SHOESTRING_CUDA_ARCHITECTURES}")

# CUDA kernels include no PyTorch header, so they compile quickly, and the CUDA emulator of the tests can
# compile the same files for the CPU. *_hopper.cu files are compiled for sm_90a only, because other GPUs lack
# its instructions. Host code launches the kernels in *_hopper.cu files only on such a GPU.
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
set_target_properties(shoestring_hopper_kernels PROPERTIES CUDA_ARCHITECTURES 90a-real)

add_library(shoestring_cuda SHARED cuda/core/runtime.cpp $<TARGET_OBJECTS:shoestring_kernels>
            $<TARGET_OBJECTS:shoestring_hopper_kernels>)
target_include_directories(shoestring_cuda PRIVATE csrc)
target_link_libraries(shoestring_cuda PUBLIC shoestring shoestring::torch_cuda PRIVATE CUDA::cudart)
# CMake 3.25 does not know C++20 for nvcc. The target shoestring_cuda compiles no CUDA source itself, but
# CMake's Makefile generator checks its CUDA standard nevertheless.
set_target_properties(shoestring_cuda PROPERTIES CUDA_STANDARD 17)
