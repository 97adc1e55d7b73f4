#pragma once

// The tensors of a block of FullyShard, which lie one after the other in memory that ranks split.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "offload/file_memory.h"
#include "offload/host_memory.h"

namespace shoestring::distributed {

/// Begins errors.
inline constexpr const char* kFullyShard = "FullyShard";

/// A parameter, or a storage of a frozen tensor, in the memory of a block.
struct Piece {
  at::Tensor tensor;
  int64_t at, numel;
  at::Tensor shard;          // the part of this rank, if the parameter is trained
  bool has_arrived = false;  // whether backward has computed the gradient
  bool is_sum = false;       // whether `gradients` has a gradient that waits for others
};

/// Pieces of a block that lie one after the other, and that are gathered together: the trained parameters of
/// a dtype, or the bytes of all that is frozen.
struct Flat {
  at::ScalarType dtype;
  bool is_trained;
  int64_t unit;     // pieces begin at multiples of this number of elements
  int64_t end = 0;  // the end of the last piece
  std::vector<Piece> pieces{};
  at::Tensor rank_part{};  // the part of this rank, of the same size on all ranks
  at::Tensor memory{};     // the parts of all ranks, while the block has its weights or receives them
  c10::intrusive_ptr<c10d::Work> arrival{};  // the all-gather into `memory`
  at::Tensor gradients{};                    // whole, until they are sent
  bool is_scaled = false;                    // whether `gradients` are divided by the number of ranks
  int64_t number = 0;  // names the gradients to the Compressor; 0 before they are sent for the first time

  at::Device device() const { return pieces[0].tensor.device(); }
  /// Returns a tensor of the elements of a piece that has its memory, or of its bytes if it is frozen.
  at::Tensor elements_of(const Piece& piece) const;
};

using Flats = std::vector<Flat>;

/// Returns whether the flats have the storage of a tensor.
bool has_storage_of(const Flats& flats, const at::Tensor& tensor);
/// Adds a tensor with a storage of its own that is not empty. `label` names the block in errors.
void insert(Flats& flats, const at::Tensor& tensor, const std::string& label);
/// Lets the storages point into the memory of all ranks' parts, or nowhere. Reads raise an error then.
void place(Flats& flats, const std::string& label, bool is_here);

/// Makes the memory of a rank's parts where FullyShardOptions::offload says.
class PartMemory {
 public:
  explicit PartMemory(const std::string& where);

  /// Makes the part of one of `ranks` ranks, zeros.
  void make(Flat& flat, int64_t ranks);
  /// Starts to read a part that lies in a file.
  void will_need(const Flat& flat) const {
    if (file_) file_->will_need(flat.rank_part);
  }
  /// Lets the kernel take the pages of a part that lies in a file.
  void let_go(const Flat& flat) const {
    if (file_) file_->let_go(flat.rank_part);
  }

 private:
  const bool on_host_;
  std::optional<offload::FileMemory> file_;
  std::optional<offload::HostMemory> host_;
};

}  // namespace shoestring::distributed
