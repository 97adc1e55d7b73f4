// Operators of Python's shoestring.distributed. They find process groups by the names that c10d knows.

#include <string>
#include <vector>

#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "distributed/backends.h"
#include "distributed/split_gradients.h"
#include "optim/optimizer_holder.h"

namespace shoestring::distributed {
namespace {

// Splits the steps of the optimizer that an OptimizerCore holds; see shard().
void shard_core(const c10::IValue& core, const std::string& group, bool gradients, int64_t bucket_bytes,
                bool find_unused) {
  TORCH_CHECK_TYPE(core.isObject(), "shard: core: expected an OptimizerCore, received ", core.tagKind());
  const auto holder = core.toObject()->getSlot(0).toCapsule();
  auto* own = dynamic_cast<optim::OptimizerHolder*>(holder.get());
  TORCH_CHECK_TYPE(own != nullptr, "shard: core: expected an OptimizerCore, received another object");
  shard(own->optimizer(), c10d::resolve_process_group(group),
        ShardOptions().gradients(gradients).bucket_bytes(bucket_bytes).find_unused(find_unused));
}

void broadcast_named(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
                     const std::string& group, const std::string& caller) {
  TensorDict all;
  for (size_t i = 0; i < tensors.size(); ++i) all.insert(names.at(i), tensors[i]);
  broadcast_tensors(c10d::resolve_process_group(group), all, caller.c_str());
}

// Returns the text of an error with the ranks that do not answer.
std::string explain(const std::string& group, const std::string& what, const std::string& error) {
  try {
    fail_collective(*c10d::resolve_process_group(group), std::runtime_error(error), what);
  } catch (const c10::Error& explained) {
    return explained.what_without_backtrace();
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.def("_shard(Any core, str group, bool gradients, int bucket_bytes, bool find_unused) -> ()", shard_core);
  m.def("_broadcast_tensors(Tensor[] tensors, str[] names, str group, str caller) -> ()", broadcast_named);
  m.def("_answer_failures(str group) -> ()",
        [](const std::string& group) { answer_failures(c10d::resolve_process_group(group)); });
  m.def("_explain_failure(str group, str what, str error) -> str", explain);
}

}  // namespace shoestring::distributed
