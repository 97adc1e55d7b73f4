# Finds LibTorch and defines the imported targets shoestring::torch_cpu, shoestring::torch and, if LibTorch
# has CUDA, shoestring::torch_cuda. The build of shoestring uses this file. It is also installed next to
# shoestringConfig.cmake, for programs that use shoestring.
#
# libtorch.so contains no code. If LibTorch has CUDA, libtorch.so loads the CUDA libraries, which costs 200 MB
# of memory even in a process that uses no GPU. shoestring::torch_cpu therefore does not link libtorch.so.
#
# find_package(Torch) is not used. With PyPI's CUDA build of PyTorch, it stops with a fatal error if there is
# no CUDA toolkit. Machines without a GPU could then not build or link shoestring.
#
# The search order is: Torch_ROOT (variable or environment), a Torch that find_package(Torch) has already
# found, CMAKE_PREFIX_PATH, the site-packages folder that contains shoestring, and the torch of the Python
# interpreter.
# Sets LibTorch_DIR, LibTorch_VERSION and LibTorch_CUDA (TRUE or FALSE), or LibTorch_ERROR.

set(LibTorch_ERROR "")
set(_header "include/torch/csrc/api/include/torch/version.h")
set(_roots)
if(DEFINED Torch_ROOT)
  list(APPEND _roots "${Torch_ROOT}")
elseif(DEFINED ENV{Torch_ROOT})
  list(APPEND _roots "$ENV{Torch_ROOT}")
else()
  if(DEFINED TORCH_INSTALL_PREFIX)
    list(APPEND _roots "${TORCH_INSTALL_PREFIX}")
  endif()
  foreach(_prefix IN LISTS CMAKE_PREFIX_PATH)
    # torch.utils.cmake_prefix_path is torch/share/cmake, two levels below the root.
    list(APPEND _roots "${_prefix}" "${_prefix}/../..")
  endforeach()
  # In site-packages, this file is in shoestring/share/cmake/shoestring, four levels below site-packages.
  list(APPEND _roots "${CMAKE_CURRENT_LIST_DIR}/../../../../torch")
endif()

set(LibTorch_DIR "")
foreach(_root IN LISTS _roots)
  if(EXISTS "${_root}/${_header}")
    get_filename_component(LibTorch_DIR "${_root}" ABSOLUTE)
    break()
  endif()
endforeach()

if(NOT LibTorch_DIR AND NOT DEFINED Torch_ROOT AND NOT DEFINED ENV{Torch_ROOT})
  if(NOT Python3_EXECUTABLE)
    find_program(Python3_EXECUTABLE NAMES python3 python)
  endif()
  if(Python3_EXECUTABLE)
    # Python's find_spec locates torch without importing it; importing torch would take seconds.
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(_root AND EXISTS "${_root}/${_header}")
      set(LibTorch_DIR "${_root}")
    endif()
  endif()
endif()

if(NOT LibTorch_DIR)
  set(LibTorch_ERROR "LibTorch was not found: set Torch_ROOT to a folder that holds ${_header}, "
                     "or Python3_EXECUTABLE to an interpreter that has torch installed")
  string(CONCAT LibTorch_ERROR ${LibTorch_ERROR})
  return()
endif()

set(_parts)
foreach(_part MAJOR MINOR PATCH)
  file(STRINGS "${LibTorch_DIR}/include/torch/headeronly/version.h" _line
       REGEX "^#define TORCH_VERSION_${_part} [0-9]+")
  string(REGEX MATCH "[0-9]+$" _number "${_line}")
  list(APPEND _parts "${_number}")
endforeach()
list(JOIN _parts "." LibTorch_VERSION)

set(LibTorch_CUDA FALSE)
if(EXISTS "${LibTorch_DIR}/lib/libtorch_cuda.so")
  set(LibTorch_CUDA TRUE)
endif()

# Reads the C++ ABI flag from LibTorch's TorchConfig.cmake. Without that file, assumes the new ABI.
set(_abi 1)
if(EXISTS "${LibTorch_DIR}/share/cmake/Torch/TorchConfig.cmake")
  file(STRINGS "${LibTorch_DIR}/share/cmake/Torch/TorchConfig.cmake" _line REGEX "GLIBCXX_USE_CXX11_ABI=0")
  if(_line)
    set(_abi 0)
  endif()
endif()

if(NOT TARGET shoestring::torch)
  add_library(shoestring::torch_cpu INTERFACE IMPORTED)
  set_target_properties(shoestring::torch_cpu PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${LibTorch_DIR}/include;${LibTorch_DIR}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${_abi}"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
  foreach(_name torch torch_cpu c10)
    add_library(shoestring::lib${_name} SHARED IMPORTED)
    set_target_properties(shoestring::lib${_name} PROPERTIES
      IMPORTED_LOCATION "${LibTorch_DIR}/lib/lib${_name}.so")
  endforeach()
  set_target_properties(shoestring::torch_cpu PROPERTIES
    INTERFACE_LINK_LIBRARIES "shoestring::libtorch_cpu;shoestring::libc10")
  add_library(shoestring::torch INTERFACE IMPORTED)
  set_target_properties(shoestring::torch PROPERTIES
    INTERFACE_LINK_LIBRARIES "shoestring::libtorch;shoestring::torch_cpu")

  if(LibTorch_CUDA)
    add_library(shoestring::torch_cuda INTERFACE IMPORTED)
    set(_libraries shoestring::torch)
    foreach(_name torch_cuda c10_cuda)
      add_library(shoestring::lib${_name} SHARED IMPORTED)
      set_target_properties(shoestring::lib${_name} PROPERTIES
        IMPORTED_LOCATION "${LibTorch_DIR}/lib/lib${_name}.so")
      list(APPEND _libraries shoestring::lib${_name})
    endforeach()
    set_target_properties(shoestring::torch_cuda PROPERTIES INTERFACE_LINK_LIBRARIES "${_libraries}")
  endif()
endif()
