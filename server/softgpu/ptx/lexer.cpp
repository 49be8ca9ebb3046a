#include "server/softgpu/ptx/lexer.h"

#include <bit>
#include <cstdlib>

namespace gpupool::softgpu::ptx {
namespace {

bool isLetter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool isDigit(char c) { return c >= '0' && c <= '9'; }
bool isWord(char c) { return isLetter(c) || isDigit(c); }
bool isHex(char c) { return isDigit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) { tokens_.reserve(source.size() / 4); }

  std::vector<Token> run() {
    while (skipBlanks()) next();
    push(TokenKind::end, at_, at_);
    return std::move(tokens_);
  }

 private:
  char peek(size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0'; }

  void push(TokenKind kind, size_t first, size_t last, uint64_t value = 0) {
    tokens_.push_back({kind, source_.substr(first, last - first), line_, value});
  }

  bool skipBlanks() {
    while (at_ < source_.size()) {
      char c = source_[at_];
      if (c == '\n') {
        ++line_, ++at_;
      } else if (c == ' ' || c == '\t' || c == '\r' || c == '\0') {
        ++at_;  // fatbins pad PTX with zeros
      } else if (c == '/' && peek(1) == '/') {
        while (at_ < source_.size() && source_[at_] != '\n') ++at_;
      } else if (c == '/' && peek(1) == '*') {
        for (at_ += 2; at_ < source_.size() && !(source_[at_] == '*' && peek(1) == '/'); ++at_)
          if (source_[at_] == '\n') ++line_;
        if (at_ >= source_.size()) throw SyntaxError{line_, "a comment without an end"};
        at_ += 2;
      } else {
        return true;
      }
    }
    return false;
  }

  void next() {
    char c = source_[at_];
    size_t first = at_;
    if (isLetter(c)) {
      while (isWord(peek())) ++at_;
      return push(TokenKind::word, first, at_);
    }
    if (isDigit(c)) return number();
    if (c == '.' && (isWord(peek(1)))) {
      ++at_;
      while (isWord(peek()) || (peek() == ':' && peek(1) == ':')) at_ += peek() == ':' ? 2 : 1;
      return push(TokenKind::dotted, first + 1, at_);
    }
    if (c == '"') {
      for (++at_; at_ < source_.size() && source_[at_] != '"'; ++at_)
        if (source_[at_] == '\n') ++line_;
      if (at_ == source_.size()) throw SyntaxError{line_, "a string without an end"};
      push(TokenKind::string, first + 1, at_);
      ++at_;
      return;
    }
    ++at_;
    push(TokenKind::mark, first, at_);
  }

  uint64_t digits(int base, size_t limit = ~size_t{0}) {
    uint64_t value = 0;
    for (size_t count = 0; count < limit && isHex(peek()); ++count, ++at_) {
      char c = peek();
      int digit = isDigit(c) ? c - '0' : (c | 0x20) - 'a' + 10;
      if (digit >= base) break;
      value = value * static_cast<unsigned>(base) + static_cast<unsigned>(digit);
    }
    return value;
  }

  void number() {
    size_t first = at_;
    char second = peek(1);
    if (peek() == '0' && (second == 'f' || second == 'F')) {
      at_ += 2;
      uint64_t bits = digits(16, 8);
      return push(TokenKind::real32, first, at_, bits);
    }
    if (peek() == '0' && (second == 'd' || second == 'D')) {
      at_ += 2;
      uint64_t bits = digits(16, 16);
      return push(TokenKind::real64, first, at_, bits);
    }
    int base = 10;
    if (peek() == '0' && (second == 'x' || second == 'X')) {
      base = 16, at_ += 2;
    } else if (peek() == '0' && (second == 'b' || second == 'B')) {
      base = 2, at_ += 2;
    } else if (peek() == '0' && isDigit(second)) {
      base = 8, ++at_;
    }
    uint64_t value = digits(base);
    if (base != 16 && peek() == '.' && isDigit(peek(1))) return decimal(first);
    if (peek() == 'U' || peek() == 'u') ++at_;
    push(TokenKind::integer, first, at_, value);
  }

  void decimal(size_t first) {
    ++at_;
    while (isDigit(peek())) ++at_;
    if ((peek() | 0x20) == 'e') {
      size_t exponent = at_ + 1;
      if (exponent < source_.size() && (source_[exponent] == '-' || source_[exponent] == '+')) ++exponent;
      if (exponent < source_.size() && isDigit(source_[exponent]))
        for (at_ = exponent; isDigit(peek());) ++at_;
    }
    double value = std::strtod(std::string(source_.substr(first, at_ - first)).c_str(), nullptr);
    push(TokenKind::real64, first, at_, std::bit_cast<uint64_t>(value));
  }

  std::string_view source_;
  size_t at_ = 0;
  uint32_t line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace gpupool::softgpu::ptx
