#pragma once
// KJ 0.9 leaves `text == StringPtr` to the compiler's turning it round, which clang does not from 16 on where
// there is an operator!= too (P2468). Included ahead of its headers where clang
// reads them: in the build of the fuzzers and by scripts/lint.

#include <kj/string.h>

namespace kj {

inline bool operator==(const char* a, const StringPtr& b) { return b == StringPtr(a); }
inline bool operator!=(const char* a, const StringPtr& b) { return !(b == a); }

}  // namespace kj
