// Operators of Python's shoestring.distributed. They find process groups by the names that c10d knows.

#include <string>
#include <vector>

#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "distributed/backends.h"
#include "distributed/named_backend.h"
#include "distributed/split_gradients.h"
#include "optim/core/optimizer_holder.h"

namespace shoestring::distributed {
namespace {

// Splits the steps of the optimizer that an OptimizerCore holds; see shard().
void shard_core(const c10::IValue& core, const std::string& group, bool gradients, int64_t bucket_bytes,
                bool find_unused, const std::string& compress) {
  TORCH_CHECK_TYPE(core.isObject(), "shard: core: expected an OptimizerCore, received ", core.tagKind());
  const auto holder = core.toObject()->getSlot(0).toCapsule();
  auto* core_holder = dynamic_cast<optim::OptimizerHolder*>(holder.get());
  TORCH_CHECK_TYPE(core_holder != nullptr, "shard: core: expected an OptimizerCore, received another object");
  shard(core_holder->optimizer(), c10d::resolve_process_group(group),
        ShardOptions()
            .gradients(gradients)
            .bucket_bytes(bucket_bytes)
            .find_unused(find_unused)
            .compress(compress));
}

void broadcast_named(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
                     const std::string& group, const std::string& caller) {
  TensorDict all;
  for (size_t i = 0; i < tensors.size(); ++i) all.insert(names.at(i), tensors[i]);
  broadcast_tensors(c10d::resolve_process_group(group), all, caller.c_str());
}

void remove_names_of(const std::string& name, int64_t number) {
  GroupPtr group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const std::exception&) {  // the group was destroyed
  }
  remove_names(group.get(), number);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.def(
      "_shard(Any core, str group, bool gradients, int bucket_bytes, bool find_unused, "
      "str compress) -> ()",
      shard_core);
  m.def("_broadcast_tensors(Tensor[] tensors, str[] names, str group, str caller) -> ()", broadcast_named);
  m.def("_name_collectives(str group) -> int",
        [](const std::string& group) { return name_collectives(*c10d::resolve_process_group(group)); });
  m.def("_survivors(str group) -> int[]",
        [](const std::string& group) { return survivors(c10d::resolve_process_group(group)); });
  m.def("_remove_names(str group, int number) -> ()", remove_names_of);
}

}  // namespace shoestring::distributed
