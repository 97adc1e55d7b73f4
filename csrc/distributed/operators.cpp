// Operators of Python's shoestring.distributed. They find process groups by the names that c10d knows.

#include <string>
#include <tuple>
#include <vector>

#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "distributed/backends.h"
#include "distributed/compressor.h"
#include "distributed/diloco.h"
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

using Ranges = std::vector<std::vector<std::tuple<at::Tensor, int64_t, int64_t>>>;

std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>>> reduced_buckets(
    const std::vector<at::Tensor>& params, const Ranges& ranges, int64_t bucket_bytes) {
  std::vector<std::vector<optim::ParameterPart>> parts;
  for (const auto& of_rank : ranges) {
    auto& own = parts.emplace_back();
    for (const auto& [param, begin, end] : of_rank) own.push_back({param, begin, end});
  }
  std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>>> result;
  for (const ReducedBucket& bucket : deal_out(params, parts, bucket_bytes).second)
    result.emplace_back(bucket.owner, bucket.elements,
                        std::vector<int64_t>(bucket.params.begin(), bucket.params.end()));
  return result;
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
  // These compute for `shoestring estimate` what processes would do.
  // Returns the bytes of the codes and the elements of a rank's part of a bucket of compressed gradients.
  m.def("_compressed_part(int elements, int ranks, int rank, int bits) -> (int bytes, int elements)",
        compressed_part);
  // Returns the bytes that each rank sends at a time when the weights of a split step are copied.
  m.def("_gather_chunk(int ranks) -> int", gather_chunk);
  // Returns the buckets in which weights are averaged, each as the indices of its parameters.
  m.def("_averaged_buckets(Tensor[] params, int bucket_elements) -> int[][]", detail::averaged_buckets);
  // Returns the buckets of split gradients in the order in which they are sent: the rank that receives the
  // bucket, its elements, and the indices of its parameters. ranges: what each rank steps.
  m.def(
      "_reduced_buckets(Tensor[] params, (Tensor, int, int)[][] ranges, int bucket_bytes) -> ((int, int, "
      "int[])[] buckets)",
      reduced_buckets);
}

}  // namespace shoestring::distributed
