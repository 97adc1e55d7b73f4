// Tests FileMemory, memory that lies in a file.

#include "catch.h"

#include <cstdint>
#include <fstream>
#include <string>

#include <ATen/ATen.h>

#include "folder.h"
#include "offload/file_memory.h"

using Catch::Contains;
using shoestring::offload::FileMemory;

namespace {

constexpr int64_t kPageBytes = shoestring::offload::SwapFile::kAlignment;

// Returns the bytes of a tensor's memory that are in pages of this process.
int64_t resident(const at::Tensor& tensor) {
  std::ifstream map("/proc/self/pagemap", std::ios::binary);
  const auto first = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) / kPageBytes;
  int64_t pages = 0;
  for (uintptr_t page = first; page < first + tensor.nbytes() / kPageBytes; ++page) {
    uint64_t entry = 0;
    map.seekg(static_cast<std::streamoff>(page * sizeof entry));
    map.read(reinterpret_cast<char*>(&entry), sizeof entry);
    pages += static_cast<int64_t>(entry >> 63);
  }
  return pages * kPageBytes;
}

}  // namespace

TEST_CASE("Tensors move into a file with their views, and their pages may go") {
  const Folder folder;
  const FileMemory memory("test", folder.path);
  for (const int64_t count : {1, 1023, 1024, 300'001}) {
    at::Tensor x = at::arange(count, at::kInt);
    const at::Tensor expected = x.clone(), tail = x.narrow(0, count / 3, count - count / 3);
    const void* const before = x.const_data_ptr();
    memory.move(x);
    CHECK(x.const_data_ptr() != before);
    CHECK(tail.const_data_ptr() == static_cast<const int32_t*>(x.const_data_ptr()) + count / 3);
    CHECK(x.equal(expected));
    tail.add_(1);
    memory.let_go(tail);
    memory.let_go(x);
    CHECK(resident(x) == 0);
    memory.will_need(x);
    CHECK(x.narrow(0, count / 3, count - count / 3)
              .equal(expected.narrow(0, count / 3, count - count / 3) + 1));
    CHECK(x.narrow(0, 0, count / 3).equal(expected.narrow(0, 0, count / 3)));
  }
  CHECK(folder.files().empty());
}

TEST_CASE("Space of the file is used again, and holds zeros") {
  const Folder folder;
  const FileMemory memory("test", folder.path);
  for (int i = 0; i < 3; ++i) {
    at::Tensor x = memory.zeros(5 * kPageBytes - 7);
    CHECK(x.sum().item<int64_t>() == 0);
    x.fill_(9);
  }
  CHECK(memory.zeros(0).numel() == 0);
}

TEST_CASE("Memory outlives the object, and other memory keeps its content") {
  const Folder folder;
  at::Tensor x;
  const at::Tensor other = at::full({64 * kPageBytes}, 7, at::kByte);
  {
    const FileMemory memory("test", folder.path);
    x = memory.zeros(kPageBytes).fill_(3);
    memory.let_go(other);
    memory.will_need(other);
    const at::Tensor left =
        at::from_blob(static_cast<char*>(x.data_ptr()) - kPageBytes, {2 * kPageBytes}, at::kByte);
    memory.let_go(left);  // not entirely in the file
  }
  CHECK(other.eq(7).all().item<bool>());
  CHECK(x.eq(3).all().item<bool>());
}

TEST_CASE("File memory says what it cannot do") {
  const Folder folder;
  const FileMemory memory("test", folder.path);
  CHECK_THROWS_WITH(FileMemory("test", folder / "none"), Contains("No such file or directory"));
  CHECK_THROWS_WITH(memory.move(at::empty({4}, at::device(at::kMeta))),
                    Contains("test: expected a tensor of the CPU with a storage, received one on meta"));
  CHECK_THROWS_WITH(memory.zeros(int64_t{1} << 50), Contains("expected room for"));
}
