#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <shoestring/files/safetensors.h>

namespace shoestring::distributed {

/// Connects the ranks by Gloo. Raises c10::Error in a build without Gloo's headers.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);

/// The table "nccl" of libshoestring_cuda, where that library was built with NCCL.
struct Nccl {
  int (*gpus)();  // the number of GPUs that this process can use
  c10::intrusive_ptr<c10d::Backend> (*make)(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);
};

/// Returns the device of the tensors by which a group compares ranks: the CPU, or the current device of a
/// group that communicates between other devices alone.
at::Device device_of(const c10d::ProcessGroup& group);

/// Sets the tag of the next collective of a Gloo backend. Collectives with different tags never meet. Does
/// nothing to other backends, and in a build without Gloo's headers.
void set_gloo_tag(c10d::Backend& backend, uint32_t tag);

/// Throws c10::Error on all ranks if the tensors of two ranks differ in number, name, shape or dtype. All
/// ranks compare with the lowest rank that differs from rank 0, so they name the same ranks.
void check_same(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const TensorDict& tensors,
                const char* caller);

/// Copies tensors of rank 0 to all ranks. Throws c10::Error on all ranks if they differ in number, name,
/// shape or dtype.
void broadcast_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const TensorDict& tensors,
                       const char* caller);

/// Returns the name under which c10d's operators find a group. A group without such a name gets one.
std::string registered_name(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Raises c10::DistBackendError for a collective that failed: see wait_for.
[[noreturn]] void fail_collective(c10d::ProcessGroup& group, const std::exception& error,
                                  const std::string& what);

}  // namespace shoestring::distributed
