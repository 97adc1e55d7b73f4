#include "offload/file_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "offload/block_runs.h"

namespace shoestring::offload {

std::optional<std::string> folder_of(const std::string& place) {
  constexpr std::string_view kDisk = "nvme:";
  if (place.size() <= kDisk.size() || !place.starts_with(kDisk)) return std::nullopt;
  return place.substr(kDisk.size());
}

MappedExtent::MappedExtent(const std::string& caller, std::shared_ptr<SwapFile> swap_file, int64_t bytes)
    : file(std::move(swap_file)), size(bytes) {
  const int64_t before = file->size();
  offset = file->allocate(size);
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  memory = ::mmap(nullptr, static_cast<size_t>(size), kAccess, MAP_SHARED, file->descriptor(), offset);
  if (memory == MAP_FAILED) file->free(offset, size);
  TORCH_CHECK(memory != MAP_FAILED, caller, ": ", file->path(), ": cannot map ", size,
              " bytes: ", std::strerror(errno));
  // If the extent was used before, or reserved, fill it with zeros. New space in the file is zero already.
  // Mapped pages count as memory of the process, so the pages of each piece are dropped from the mapping; the
  // file keeps them.
  if (offset >= before) return;
  constexpr int64_t kPiece = int64_t{16} << 20;
  for (int64_t at = 0; at < size; at += kPiece) {
    char* piece = static_cast<char*>(memory) + at;
    const auto length = static_cast<size_t>(std::min(kPiece, size - at));
    std::memset(piece, 0, length);
    ::madvise(piece, length, MADV_DONTNEED);
  }
}

MappedExtent::~MappedExtent() {
  ::munmap(memory, static_cast<size_t>(size));
  file->free(offset, size);
}

// The addresses of the memory that tensors have at present.
struct FileMemory::Mapped {
  std::mutex mutex;
  std::map<uintptr_t, uintptr_t> ends;  // the end of each range, by its begin
};

FileMemory::FileMemory(std::string caller, const std::string& folder)
    : caller_(std::move(caller)), file_(std::make_shared<SwapFile>(caller_, folder)),
      mapped_(std::make_shared<Mapped>()) {}

at::Tensor FileMemory::zeros(int64_t bytes) const {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (bytes == 0) return at::empty({0}, options);
  auto extent = std::make_shared<MappedExtent>(caller_, file_, at::round_up(bytes, SwapFile::kAlignment));
  const auto begin = reinterpret_cast<uintptr_t>(extent->memory);
  const std::lock_guard lock(mapped_->mutex);
  mapped_->ends[begin] = begin + static_cast<uintptr_t>(extent->size);
  auto free = [extent = std::move(extent), mapped = mapped_, begin](void*) mutable {
    const std::lock_guard lock(mapped->mutex);
    mapped->ends.erase(begin);
    extent = nullptr;  // before another extent gets these addresses
  };
  return at::from_blob(reinterpret_cast<void*>(begin), {bytes}, std::move(free), options);
}

void FileMemory::move(const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.has_storage() && tensor.device().is_cpu(), caller_,
              ": expected a tensor of the CPU with a storage, received one on ", tensor.device());
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  if (storage.nbytes() == 0) return;
  const at::Tensor memory = zeros(static_cast<int64_t>(storage.nbytes()));
  std::memcpy(memory.mutable_data_ptr(), storage.data(), storage.nbytes());
  place_storage(storage, memory.mutable_data_ptr(), memory);
  let_go(memory);
}

// Gives the kernel advice for the pages that lie entirely in a tensor. (MADV_DONTNEED for memory of another
// kind would lose its content.)
void FileMemory::advise(const at::Tensor& tensor, int advice) const {
  constexpr uintptr_t kPage = SwapFile::kAlignment;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t first = at::round_up(begin, kPage), last = (begin + tensor.nbytes()) / kPage * kPage;
  const std::lock_guard lock(mapped_->mutex);
  const auto after = mapped_->ends.upper_bound(begin);
  if (first >= last || after == mapped_->ends.begin() || last > std::prev(after)->second) return;
  ::madvise(reinterpret_cast<void*>(first), last - first, advice);
}

void FileMemory::will_need(const at::Tensor& tensor) const { advise(tensor, MADV_WILLNEED); }

void FileMemory::let_go(const at::Tensor& tensor) const { advise(tensor, MADV_DONTNEED); }

}  // namespace shoestring::offload
