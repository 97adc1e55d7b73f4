#include <functional>
#include <map>
#include <string>
#include <string_view>

#include <c10/util/Exception.h>

#include "core/cuda.h"

namespace shoestring::cuda {
namespace {

struct Provided {
  const void* table;
  const std::type_info* type;
};

std::map<std::string, Provided, std::less<>>& tables() {
  static std::map<std::string, Provided, std::less<>> all;
  return all;
}

}  // namespace

void provide(const char* name, const void* table, const std::type_info& type) {
  tables()[name] = {table, &type};
}

const void* provided(const char* name, const std::type_info& type) {
  const void* table = find_provided(name, type);
  TORCH_CHECK(table != nullptr, name,
              ": this shoestring was built without CUDA kernels; "
              "`python -m shoestring` says why; reinstall it where nvcc is found, or use CPU tensors");
  return table;
}

const void* find_provided(const char* name, const std::type_info& type) {
  const auto found = tables().find(std::string_view(name));
  if (found == tables().end()) return nullptr;
  TORCH_INTERNAL_ASSERT(*found->second.type == type, name,
                        ": the table of the CUDA kernels has another type");
  return found->second.table;
}

}  // namespace shoestring::cuda
