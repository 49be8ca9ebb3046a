#pragma once
// Golden files: bytes that left this code once and must never change without a new protocol version. A file
// is text:
// `# what it is`, `size N`, then `offset: bytes`, 16 to a line, all in hexadecimal; lines that are all zero
// are left out. With GPUPOOL_UPDATE_GOLDEN=1 in the environment the files are written instead of compared.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace gpupool::golden {

// The text of a golden file.
std::string toText(const std::string& what, std::span<const std::byte> bytes);
// The bytes in a golden file's text; throws std::runtime_error if it is not one.
std::vector<std::byte> fromText(const std::string& text);

// Checks that `bytes` are what tests/golden/bytes/NAME.txt holds, and returns what it holds. `what` is its
// comment.
std::vector<std::byte> pinned(const std::string& name, const std::string& what,
                              std::span<const std::byte> bytes);

template <class T>
std::span<const std::byte> bytesOf(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace gpupool::golden
