#include <map>
#include <string>

#include <c10/util/Exception.h>

#include "core/cuda_tables.h"

namespace shoestring::cuda {
namespace {

std::map<std::string, const void*>& tables() {
  static std::map<std::string, const void*> all;
  return all;
}

}  // namespace

void provide(const char* name, const void* table) { tables()[name] = table; }

const void* provided(const char* name) {
  const auto found = tables().find(name);
  TORCH_CHECK(found != tables().end(), name,
              ": this shoestring was built without CUDA kernels; "
              "`python -m shoestring` says why; reinstall it where nvcc is found, or use CPU tensors");
  return found->second;
}

}  // namespace shoestring::cuda
