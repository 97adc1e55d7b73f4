#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace shoestring::distributed {

/// A collective that a rank has issued, or a send or receive.
struct Collective {
  const char* name = "";  ///< its name in torch.distributed
  int64_t number = 0;     ///< counts the collectives of the group from 1; 0 for sends and receives
  size_t tensors = 0;
  std::vector<int64_t> sizes;  ///< sizes of the first tensor
  at::ScalarType dtype = at::kByte;
  int64_t elements = 0;  ///< number of elements of all tensors; 0 if it may differ by rank
  int64_t root = -1;     ///< the rank that `name` speaks of, or -1
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;

  /// Returns a hash of all that must be the same on all ranks. Shapes with the same number of elements are.
  uint32_t key() const;

  /// Returns for example "collective 12, all_reduce of [64, 8] Float".
  std::string text() const;
};

/// Finds out which ranks of a group have ended, and where the others are, after a collective has failed.
///
/// A thread asks the store four times a second whether any rank has failed. It then publishes the last
/// collectives of this rank, and reads those of the others. Only this thread uses the store, so a store that
/// does not answer never blocks the threads of the program. Each Listener needs keys of its own in the store.
class Listener {
 public:
  Listener(c10d::Store& store, int64_t rank, int64_t size);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  /// Gives a collective its number and keeps it among the last.
  void record(Collective& collective);

  /// Tells the other ranks that this rank has failed. Returns, within two seconds, the ranks that do not
  /// answer and the ranks that have issued other collectives, as the end of an error message.
  std::string verdict();

  /// Returns the verdict if this rank or another one has failed.
  std::optional<std::string> failure();

  /// Returns the ranks that have answered after a failure, the same on all ranks. Raises c10::Error, which
  /// `caller` begins, without a failure or an answer of the store.
  std::vector<int64_t> survivors(const char* caller);

  /// Ends the thread. verdict() says nothing from then on.
  void end();

  /// Returns "rank 0 of 3: " of the rank.
  std::string rank() const;

 private:
  struct State;
  static void listen(State& state, c10d::Store& store);
  static void leave(State& state, c10d::Store& store);
  static void confer(State& state, c10d::Store& store, bool is_own);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

/// Returns the first line of an error.
std::string first_line(const std::exception& error);

/// Returns whether torchrun's agent hosts the store. Otherwise rank 0 does.
bool agent_has_store();

}  // namespace shoestring::distributed
