#pragma once
// Files that a program carries inside it (cmake/Embed.cmake). They live as long as the program.

#include <span>
#include <string_view>

namespace gpupool {

struct EmbeddedFile {
  std::string_view name;                 // below the folder that was embedded
  std::string_view sha256;               // of its bytes: 64 hexadecimal digits
  std::span<const unsigned char> bytes;  // any; no terminating zero
};

}  // namespace gpupool
