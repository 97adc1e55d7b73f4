# Packages for C++: `cpack` in the build folder (`make packages`) writes a .tar.gz and a Debian package. Both hold the
# tree of `cmake --install`, without the file that only the Python package reads.

# The part of a version that names the PyTorch and CUDA of a build, as in 0.1.0+torch2.11.cu130; setup.py forms the same.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _minor "${LibTorch_VERSION}")
if(SHOESTRING_CUDA_JSON STREQUAL "null")
  set(_device cpu)
else()
  string(REGEX REPLACE "[\".]" "" _device "cu${SHOESTRING_CUDA_JSON}")
endif()
set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}+torch${_minor}.${_device}")

set(CPACK_GENERATOR TGZ DEB)
set(CPACK_PACKAGE_NAME shoestring)
set(CPACK_PACKAGE_VENDOR "shoestring")
set(CPACK_PACKAGE_CONTACT "the shoestring authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "training-efficiency operators for LibTorch ${_minor} (C++ library and headers)")
string(TOLOWER "${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}" _platform)
set(CPACK_PACKAGE_FILE_NAME "shoestring-${CPACK_PACKAGE_VERSION}-${_platform}")
set(CPACK_PACKAGE_DIRECTORY "${CMAKE_BINARY_DIR}/packages")
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};shoestring;cpp;/" "${CMAKE_BINARY_DIR};shoestring;documents;/")

set(CPACK_DEBIAN_PACKAGE_NAME libshoestring-dev)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# dpkg-shlibdeps derives the dependencies from the libraries. LibTorch is no Debian package: programs find it through
# Torch_ROOT. dpkg-shlibdeps still must find its libraries, and the CUDA runtime that PyTorch brings.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
file(GLOB _private "${LibTorch_DIR}/lib" "${LibTorch_DIR}/../nvidia/cu*/lib")
if(CUDAToolkit_LIBRARY_DIR)
  list(APPEND _private "${CUDAToolkit_LIBRARY_DIR}")
endif()
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${CMAKE_BINARY_DIR};${_private}")

install(FILES LICENSE NOTICE DESTINATION share/doc/libshoestring-dev COMPONENT documents EXCLUDE_FROM_ALL)
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/package_rpath.cmake")
include(CPack)
