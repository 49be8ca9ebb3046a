#pragma once
// Splits PTX text into tokens (PTX ISA 9.0, chapter 4 "Syntax"). Tokens are views into the text.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpupool::softgpu::ptx {

enum class TokenKind : uint8_t {
  word,     // identifier, with its leading % $ _ where it has one
  dotted,   // .word: a directive or a modifier; text without the dot, "::" included
  integer,  // value
  real32,   // 0fXXXXXXXX: value holds the bits
  real64,   // 0dX..X, or a decimal literal: value holds the bits of a double
  string,   // text without the quotes
  mark,     // one character
  end,
};

struct Token {
  TokenKind kind = TokenKind::end;
  std::string_view text;
  uint32_t line = 0;
  uint64_t value = 0;
};

// Every problem in PTX text: what() is "line N: ...".
struct SyntaxError {
  uint32_t line = 0;
  std::string text;
};

// The last token is always `end`. Throws SyntaxError at a character no token starts with.
std::vector<Token> tokenize(std::string_view source);

}  // namespace gpupool::softgpu::ptx
