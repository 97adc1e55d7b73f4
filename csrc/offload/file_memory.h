#pragma once

// Memory that lies in a swap file.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <shoestring/core/export.h>

#include "offload/swap_file.h"

namespace shoestring::offload {

/// Returns the folder DIR of a place "nvme:DIR", or none for other places.
SHOESTRING_API std::optional<std::string> folder_of(const std::string& place);

/// An extent of a swap file that is mapped into memory. It holds zeros at first. Its space is free again when
/// the object is gone.
struct SHOESTRING_API MappedExtent {
  /// `size` is a multiple of SwapFile::kAlignment. Raises an error that begins with `caller` if the disk has
  /// no room.
  MappedExtent(const std::string& caller, std::shared_ptr<SwapFile> file, int64_t size);
  ~MappedExtent();
  MappedExtent(const MappedExtent&) = delete;
  MappedExtent& operator=(const MappedExtent&) = delete;

  const std::shared_ptr<SwapFile> file;
  const int64_t size;
  int64_t offset = 0;  // position in the file
  void* memory = nullptr;
};

/// Memory of CPU tensors that is mapped from a file without a name, so that it need not stay in RAM. If RAM
/// is short, the kernel writes changed pages to the file and frees them. It reads a page again at its next
/// use. Space on the disk is reserved at once. A disk that fails to read a page ends the process (SIGBUS).
class SHOESTRING_API FileMemory : public torch::CustomClassHolder {
 public:
  /// Errors begin with `caller`. `folder` must exist.
  FileMemory(std::string caller, const std::string& folder);

  /// Returns zeros (bytes), dtype at::kByte, that lie in the file.
  at::Tensor zeros(int64_t bytes) const;
  /// Moves the storage of a tensor of the CPU into the file. All tensors that share it move.
  void move(const at::Tensor& tensor) const;
  /// Starts to read the pages of a tensor. Does nothing if the tensor does not lie in the file.
  void will_need(const at::Tensor& tensor) const;
  /// Lets the kernel take the pages that lie entirely in a tensor; their content stays. Does nothing if the
  /// tensor does not lie in the file.
  void let_go(const at::Tensor& tensor) const;

 private:
  struct Mapped;
  void advise(const at::Tensor& tensor, int advice) const;

  const std::string caller_;
  const std::shared_ptr<SwapFile> file_;
  const std::shared_ptr<Mapped> mapped_;
};

}  // namespace shoestring::offload
