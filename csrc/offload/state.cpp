#include "offload/state.h"

// The layout of an optimizer's offloaded state in host memory or in a file: how parameters, chunks and parts
// are placed.

#include <algorithm>
#include <tuple>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "offload/file_memory.h"

namespace shoestring::offload {
namespace {

// Chunks begin at multiples of this many blocks (of 256 parameter elements). Every part of a chunk (codes,
// scales, ...) then consists of whole pages, even if it has only four bytes per block.
constexpr int64_t kEdge = 1024;
// Bytes per chunk of state. The parts of such a chunk have a few MiB each: large enough for the full speed of
// a disk, and small enough for the CPU's caches.
constexpr int64_t kChunkBytes = int64_t{8} << 20;

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t block_bytes(const std::vector<at::ScalarType>& dtypes, const std::vector<int64_t>& per_block) {
  int64_t bytes = 0;
  for (size_t i = 0; i < dtypes.size(); ++i)
    bytes += per_block[i] * static_cast<int64_t>(c10::elementSize(dtypes[i]));
  return bytes;
}

// Places the state of the parameters one after the other, with `bytes` bytes of state per block of 256
// parameter elements, and divides it into chunks. Returns the first block of each parameter, and the blocks
// at which chunks begin and end.
std::pair<std::vector<int64_t>, std::vector<int64_t>> layout(int64_t bytes,
                                                             const std::vector<int64_t>& blocks,
                                                             bool splits) {
  std::vector<int64_t> begins, edges{0};
  int64_t total = 0;
  const int64_t most = up(std::max<int64_t>(kChunkBytes / std::max<int64_t>(bytes, 1), 1), kEdge);
  for (const int64_t n : blocks) {
    if (!splits && n > 0 && total > edges.back() && total + n > edges.back() + most) {
      total = up(total, kEdge);
      edges.push_back(total);
    }
    begins.push_back(total);
    total += n;
    if (splits) {
      while (total > edges.back() + most) edges.push_back(edges.back() + most);
    }
  }
  total = std::max(up(total, kEdge), kEdge);
  if (total > edges.back()) edges.push_back(total);
  return {std::move(begins), std::move(edges)};
}

}  // namespace

Offload::Offload(std::string caller, const std::string& where, c10::Device device)
    : caller(std::move(caller)), device(device), memory(this->caller, device), in(device), out(device) {
  const auto folder = folder_of(where);
  TORCH_CHECK_VALUE(folder || where == "cpu" || where == "stream", this->caller,
                    ": expected None, \"cpu\", \"stream\" or \"nvme:DIR\", received \"", where, "\"");
  if (folder) file = std::make_shared<SwapFile>(this->caller, *folder);
}

State::State(c10::intrusive_ptr<Offload> offload, const std::vector<at::ScalarType>& dtypes,
             std::vector<int64_t> per_block, const std::vector<int64_t>& blocks, bool splits)
    : offload_(std::move(offload)), per_block_(std::move(per_block)), blocks_(blocks) {
  const int64_t bytes = block_bytes(dtypes, per_block_);
  std::tie(begins_, edges_) = layout(bytes, blocks_, splits);
  const int64_t total = edges_.back();

  int64_t offset = 0;
  std::shared_ptr<MappedExtent> region;
  if (offload_->file != nullptr && bytes > 0) {
    region = std::make_shared<MappedExtent>(offload_->caller, offload_->file, total * bytes);
    offset = region->offset;
  }
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const int64_t elements = total * per_block_[i];
    if (region == nullptr) {
      values_.push_back(offload_->memory.empty({elements}, dtypes[i], total * bytes).zero_());
      continue;
    }
    void* begin = static_cast<char*>(region->memory) + (offset - region->offset);
    values_.push_back(
        at::from_blob(begin, {elements}, [region](void*) {}, at::TensorOptions().dtype(dtypes[i])));
    offsets_.push_back(offset);
    offset += static_cast<int64_t>(values_.back().nbytes());
  }
}

int64_t State::bytes(const std::vector<at::ScalarType>& dtypes, const std::vector<int64_t>& per_block,
                     const std::vector<int64_t>& blocks, bool splits) {
  const int64_t bytes = block_bytes(dtypes, per_block);
  return layout(bytes, blocks, splits).second.back() * bytes;
}

std::vector<int64_t> State::edges(int64_t bytes, const std::vector<int64_t>& blocks, bool splits) {
  return layout(bytes, blocks, splits).second;
}

std::vector<int64_t> State::chunks(int64_t first, int64_t last) const {
  std::vector<int64_t> numbers;
  for (int64_t i = first; i < last; ++i) {
    const int64_t end = begins_[static_cast<size_t>(i)] + blocks_[static_cast<size_t>(i)];
    int64_t chunk = chunk_of(begins_[static_cast<size_t>(i)]);
    do {
      if (numbers.empty() || numbers.back() < chunk) numbers.push_back(chunk);
    } while (edges_[static_cast<size_t>(++chunk)] < end);
  }
  return numbers;
}

// Returns the index of the chunk that contains `block`. For a parameter without blocks, `block` is where the
// parameter would begin.
int64_t State::chunk_of(int64_t block) const {
  const auto after = std::upper_bound(edges_.begin() + 1, edges_.end() - 1, block);
  return after - edges_.begin() - 1;
}

State::Piece State::piece(int64_t chunk, int64_t first, int64_t last) const {
  const int64_t begin = edges_[static_cast<size_t>(chunk)], end = edges_[static_cast<size_t>(chunk) + 1];
  const auto begin_of = [&](int64_t i) { return begins_[static_cast<size_t>(i)]; };
  const auto end_of = [&](int64_t i) { return begin_of(i) + blocks_[static_cast<size_t>(i)]; };
  // A parameter without elements also belongs to a chunk, because a step must advance the step counter of
  // every parameter.
  const auto is_in = [&](int64_t i) {
    return chunk_of(begin_of(i)) <= chunk && (end_of(i) > begin || begin_of(i) == begin);
  };
  while (first < last && !is_in(first)) ++first;
  while (last > first && chunk_of(begin_of(last - 1)) > chunk) --last;
  if (first == last) return {first, last, 0, 0, 0};
  const int64_t from = std::max(begin, begin_of(first)), to = std::min(end, end_of(last - 1));
  return {first, last, from - begin_of(first), from - begin, std::max<int64_t>(to - from, 0)};
}

std::vector<Tensor> State::parts_of(const std::vector<Tensor>& whole, int64_t begin, int64_t blocks) const {
  std::vector<Tensor> parts;
  for (size_t i = 0; i < whole.size(); ++i) {
    parts.push_back(whole[i].narrow(0, begin * per_block_[i], blocks * per_block_[i]));
  }
  return parts;
}

int64_t State::file_offset(size_t part, int64_t block) const {
  return offsets_[part] + block * per_block_[part] * static_cast<int64_t>(values_[part].element_size());
}

}  // namespace shoestring::offload
