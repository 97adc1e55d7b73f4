#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

/// Reads a token file of `shoestring tokenize`: a header of 64 bytes, then the tokens, all little-endian. The
/// header consists of magic "shoetok\1", uint32 vocabulary size, uint32 bytes per token (2 or 4), uint64
/// number of tokens, and 40 zero bytes. The file is read and not memory-mapped, because mapped pages would
/// count as memory of the process.
class TokenFile {
 public:
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  int64_t size() const { return size_; }
  int64_t vocab_size() const { return vocab_size_; }
  /// Writes the tokens at positions [begin, begin + length) for each `begin` in `begins` to `out`, which has
  /// room for (begins, length) elements.
  void read(const std::vector<int64_t>& begins, int64_t length, int64_t* out) const;
  /// Returns a text that identifies the token file: its number of tokens, vocabulary size, and a hash of its
  /// tokens.
  std::string fingerprint() const;

 private:
  void read_bytes(void* out, int64_t bytes, int64_t offset) const;

  std::string path_;
  int fd_ = -1;
  int64_t vocab_size_ = 0, width_ = 0, size_ = 0;
};

/// A range of consecutive blocks of a token file. A block has seq_len tokens, and is read together with the
/// token that follows it.
struct Blocks {
  const TokenFile& file;
  int64_t seq_len, begin, count;  // the blocks with indices [begin, begin + count) of the file

  /// Returns the blocks with the given numbers, counted from `begin`, as int64 (rows, seq_len + 1).
  at::Tensor rows(const std::vector<int64_t>& numbers) const;
  /// Writes what rows(numbers) returns into a contiguous tensor on the host.
  void read(const std::vector<int64_t>& numbers, const at::Tensor& rows) const;
};

struct Split {
  Blocks train, validation;
};
/// Splits a token file into blocks of seq_len tokens. The last val_fraction of the blocks, but at least one
/// block, is for validation, the others are for training. A val_fraction of 0 holds nothing out.
Split split(const TokenFile& file, int64_t seq_len, double val_fraction);

/// Computes which blocks form each micro-batch, from the seed and the number of the micro-batch alone. So a
/// resumed run needs no saved state. Every pass over the data uses a new permutation.
class BatchOrder {
 public:
  BatchOrder(int64_t blocks, int64_t batch_size, int64_t seed);
  std::vector<int64_t> batch(int64_t number);

 private:
  int64_t blocks_, batch_size_, seed_, pass_ = -1;
  std::vector<int64_t> permutation_;
};
