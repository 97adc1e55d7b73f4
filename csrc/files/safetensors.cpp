#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <shoestring/files/safetensors.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/huge_pages.h"
#include "files/read_file.h"
#include "files/safetensors_files.h"
#include "files/safetensors_format.h"
#include "files/safetensors_header.h"
#include "files/safetensors_writer.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors files are little-endian");

namespace shoestring {
namespace {

using files::quote;

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  int64_t size = 0;
  fd_ = files::open_regular("safetensors", path, size);
  try {
    TORCH_CHECK_VALUE(size >= 8, "safetensors: ", path,
                      ": expected at least the 8 bytes of the header's length, ", "received a file of ",
                      size);
    uint64_t length = 0;
    files::read_at("safetensors", path, fd_, &length, 8, 0);
    TORCH_CHECK_VALUE(length <= files::kMaxHeader, "safetensors: ", path, ": expected a header of at most ",
                      files::kMaxHeader, " bytes, received the length ", length,
                      ": this is no safetensors file");
    data_ = 8 + static_cast<int64_t>(length);
    TORCH_CHECK_VALUE(data_ <= size, "safetensors: ", path, ": the header's length is ", length,
                      " bytes, but only ", size - 8, " follow: the file is truncated");
    std::string text(length, '\0');
    files::read_at("safetensors", path, fd_, text.data(), static_cast<int64_t>(text.size()), 8);

    auto header = files::parse_header(path, text, size - data_);
    entries_ = std::move(header.entries);
    metadata_ = std::move(header.metadata);
    for (size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].name, i);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { ::close(fd_); }

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto at = index_.find(name);
  TORCH_CHECK_VALUE(at != index_.end(), "safetensors: ", path_, ": there is no tensor ", quote(name));
  return entries_[at->second];
}

void SafetensorsFile::read(const Entry& entry, const at::Tensor& out) const {
  files::read_at("safetensors", path_, fd_, out.mutable_data_ptr(), entry.end - entry.begin,
                 data_ + entry.begin);
  if (entry.dtype == at::kBool) {
    // A bool tensor with bytes other than 0 and 1 would cause undefined behaviour when it is used.
    const auto* bytes = static_cast<const unsigned char*>(out.const_data_ptr());
    const bool valid = std::all_of(bytes, bytes + out.numel(), [](unsigned char b) { return b <= 1; });
    TORCH_CHECK_VALUE(valid, "safetensors: ", path_, ": tensor ", quote(entry.name),
                      ": expected bytes 0 and 1 for BOOL");
  }
}

at::Tensor SafetensorsFile::load(const std::string& name) const {
  const Entry& entry = this->entry(name);
  at::Tensor out = in_huge_pages(at::empty(entry.shape, entry.dtype));
  read(entry, out);
  return out;
}

at::Tensor SafetensorsFile::map(const std::string& name) const {
  const Entry& entry = this->entry(name);
  const int64_t begin = data_ + entry.begin, size = entry.end - entry.begin;
  const bool is_aligned = begin % static_cast<int64_t>(c10::elementSize(entry.dtype)) == 0;
  if (size == 0 || !is_aligned || entry.dtype == at::kBool) return load(name);  // read() checks bools
  const int64_t before = begin % ::sysconf(_SC_PAGESIZE);
  const auto mapped = static_cast<size_t>(before + size);
  void* const memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd_, begin - before);
  TORCH_CHECK(memory != MAP_FAILED, "safetensors: ", path_, ": tensor ", quote(name), ": cannot map ", size,
              " bytes: ", std::strerror(errno));
  return at::from_blob(
      static_cast<char*>(memory) + before, entry.shape, [=](void*) { ::munmap(memory, mapped); },
      at::TensorOptions(entry.dtype));
}

at::Tensor SafetensorsFile::load_range(const std::string& name, int64_t begin, int64_t end) const {
  Entry range = entry(name);
  const auto size = static_cast<int64_t>(c10::elementSize(range.dtype));
  TORCH_CHECK_VALUE(begin >= 0 && begin <= end && end * size <= range.end - range.begin,
                    "safetensors: ", path_, ": tensor ", quote(name), ": expected a range of its ",
                    (range.end - range.begin) / size, " elements, received [", begin, ", ", end, ")");
  range.end = range.begin + end * size;
  range.begin += begin * size;
  at::Tensor out = in_huge_pages(at::empty({end - begin}, range.dtype));
  read(range, out);
  return out;
}

void SafetensorsFile::load_into(const std::string& name, const at::Tensor& out) const {
  const Entry& entry = this->entry(name);
  TORCH_CHECK_VALUE(out.sizes() == entry.shape && out.scalar_type() == entry.dtype, "safetensors: ", path_,
                    ": tensor ", quote(name), ": expected shape ", out.sizes(), " of ", out.scalar_type(),
                    ", the file has ", at::IntArrayRef(entry.shape), " of ", entry.dtype);
  // The detached tensor shares out's memory but no autograd history. A parameter can therefore be written
  // even while gradients are recorded.
  const at::Tensor plain = out.detach();
  if (out.is_cpu() && out.is_contiguous()) {
    read(entry, plain);
    plain.unsafeGetTensorImpl()->bump_version();
  } else {
    plain.copy_(load(name));
  }
}

TensorDict load_safetensors(const std::string& path) {
  const files::SafetensorsFiles files(path);
  TensorDict tensors("tensor");
  for (const auto& name : files.names()) tensors.insert(name, files.file(name).load(name));
  return tensors;
}

void save_safetensors(const std::string& path, const TensorDict& tensors, const Metadata& metadata) {
  std::vector<files::TensorInfo> infos;
  for (const auto& item : tensors)
    infos.push_back(files::info_of("save_safetensors", path, item.key(), item.value()));
  files::SafetensorsWriter writer("save_safetensors", path, std::move(infos), metadata);
  for (const files::TensorInfo& info : writer.order()) writer.write(tensors[info.name]);
  writer.commit();
}

}  // namespace shoestring
