#include "distributed/flat_block.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/ceil_div.h>
#include <c10/util/StringUtil.h>

#include "offload/block_runs.h"
#include "optim/split/split_params.h"

namespace shoestring::distributed {

using at::Tensor;

namespace {

// Parameters begin at multiples of this many elements, and each rank has a multiple: blocks of 8-bit state
// are those of one process.
constexpr int64_t kElements = 256;
// Frozen storages begin at multiples of this many bytes, as those of PyTorch's CUDA allocator do.
constexpr int64_t kBytes = 512;

}  // namespace

Tensor Flat::elements_of(const Piece& piece) const {
  if (is_trained) return piece.tensor.detach().view({-1});
  auto* const data = piece.tensor.storage().unsafeGetStorageImpl()->mutable_data();
  return at::from_blob(data, {piece.numel}, piece.tensor.options().dtype(at::kByte).requires_grad(false));
}

bool has_storage_of(const Flats& flats, const Tensor& tensor) {
  const auto* const storage = tensor.storage().unsafeGetStorageImpl();
  return std::any_of(flats.begin(), flats.end(), [&](const Flat& f) {
    return std::any_of(f.pieces.begin(), f.pieces.end(),
                       [&](const Piece& p) { return p.tensor.storage().unsafeGetStorageImpl() == storage; });
  });
}

void insert(Flats& flats, const Tensor& tensor, const std::string& label) {
  const auto size = static_cast<int64_t>(tensor.storage().nbytes());
  const bool trained = tensor.requires_grad();
  TORCH_CHECK(!trained || (tensor.is_leaf() && tensor.is_contiguous() && tensor.storage_offset() == 0 &&
                           size == static_cast<int64_t>(tensor.nbytes())),
              kFullyShard, ": ", label,
              ": expected parameters that are contiguous and have storages of their own, ",
              "received one of ", tensor.sizes(), " in a storage of ", size, " bytes");
  const auto dtype = trained ? tensor.scalar_type() : at::kByte;
  auto flat = std::find_if(flats.begin(), flats.end(), [&](const Flat& f) {
    return f.dtype == dtype && f.is_trained == trained && f.device() == tensor.device();
  });
  if (flat == flats.end()) flat = flats.insert(flat, Flat{dtype, trained, trained ? kElements : kBytes});
  const int64_t at = at::round_up(flat->end, flat->unit);
  const int64_t numel = trained ? tensor.numel() : size;
  flat->pieces.push_back({tensor, at, numel, {}});
  flat->end = at + numel;
}

void place(Flats& flats, const std::string& label, bool is_here) {
  for (Flat& f : flats) {
    for (Piece& p : f.pieces) {
      if (f.is_trained) optim::set_part(p.tensor, p.shard, /*is_alone=*/!is_here);
      auto& storage = *p.tensor.storage().unsafeGetStorageImpl();
      if (is_here) {
        char* const begin = static_cast<char*>(f.memory.data_ptr());
        offload::place_storage(storage, begin + p.at * f.rank_part.element_size(), f.memory);
      } else {
        offload::empty_storage(storage,
                               c10::str(kFullyShard, ": ", label, ": expected whole weights, received some ",
                                        "that processes have split: read or change them within present()"),
                               at::DataPtr(nullptr, p.tensor.device()));
      }
    }
  }
}

PartMemory::PartMemory(const std::string& where) : on_host_(where == "cpu") {
  const auto folder = offload::folder_of(where);
  TORCH_CHECK_VALUE(folder || on_host_ || where == "none", kFullyShard,
                    ": offload: expected \"none\", \"cpu\" or \"nvme:DIR\", received \"", where, "\"");
  if (folder) file_.emplace(c10::str(kFullyShard, ": offload"), *folder);
}

void PartMemory::make(Flat& flat, int64_t ranks) {
  const int64_t size = at::ceil_div(at::ceil_div(flat.end, flat.unit), ranks) * flat.unit;
  const int64_t bytes = size * static_cast<int64_t>(c10::elementSize(flat.dtype));
  if (file_) {
    flat.rank_part = file_->zeros(bytes).view(flat.dtype);
  } else if (on_host_) {
    TORCH_CHECK_VALUE(
        !flat.device().is_cpu(), kFullyShard,
        ": offload: expected parameters on a GPU with \"cpu\", received some on the CPU, which ",
        "are in host memory already; use \"nvme:DIR\"");
    if (!host_) host_.emplace(c10::str(kFullyShard, ": offload"), flat.device());
    flat.rank_part = host_->empty({size}, flat.dtype, bytes).zero_();
  } else {
    flat.rank_part = at::zeros({size}, at::device(flat.device()).dtype(flat.dtype));
  }
}

}  // namespace shoestring::distributed
