#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace shoestring::distributed {

/// Connects the ranks by Gloo. Raises c10::Error in a build without Gloo's headers.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);

/// Raises c10::Error for a collective that failed: see wait_for.
[[noreturn]] void fail_collective(c10d::ProcessGroup& group, const std::exception& error,
                                  const std::string& what);

}  // namespace shoestring::distributed
