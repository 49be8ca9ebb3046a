// The declarations at the outermost level of PTX. A text that the driver takes is taken here, too; many that
// it refuses are as well.
#include <algorithm>
#include <charconv>
#include <optional>

#include "server/fatbin/contents.h"

namespace gpupool::fatbin {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 40;  // of a variable

struct Token {
  enum class Kind : uint8_t { end, word, text, mark, damaged } kind = Kind::end;
  std::string_view text;  // a directive with its point; without the quotes
  bool is(std::string_view other) const { return kind != Kind::text && text == other; }
  bool directive() const { return kind == Kind::word && text.starts_with('.'); }
};

bool isWordLetter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
         c == '%';
}

class Tokens {
 public:
  explicit Tokens(std::string_view source) : rest_(source) { take(); }
  const Token& peek() const { return next_; }
  Token take() {
    Token taken = next_;
    next_ = read();
    return taken;
  }
  bool takeIf(std::string_view text) {
    if (!next_.is(text)) return false;
    take();
    return true;
  }

 private:
  bool skipBlanks();
  Token read();
  Token cut(Token::Kind kind, size_t length) {
    const Token token{kind, rest_.substr(0, length)};
    rest_.remove_prefix(length);
    return token;
  }

  std::string_view rest_;
  Token next_;
};

// False: a comment has no end.
bool Tokens::skipBlanks() {
  while (!rest_.empty()) {
    if (rest_.starts_with("//")) {
      rest_.remove_prefix(std::min(rest_.find('\n'), rest_.size()));
    } else if (rest_.starts_with("/*")) {
      const size_t end = rest_.find("*/", 2);
      if (end == std::string_view::npos) return false;
      rest_.remove_prefix(end + 2);
    } else if (rest_[0] == ' ' || (rest_[0] >= '\t' && rest_[0] <= '\r')) {
      rest_.remove_prefix(1);
    } else {
      break;
    }
  }
  return true;
}

Token Tokens::read() {
  if (!skipBlanks()) return {Token::Kind::damaged, {}};
  if (rest_.empty()) return {};
  if (rest_[0] == '"') {
    size_t end = 1;
    while (end < rest_.size() && rest_[end] != '"' && rest_[end] != '\n') end += rest_[end] == '\\' ? 2 : 1;
    if (end >= rest_.size() || rest_[end] != '"') return {Token::Kind::damaged, {}};
    Token token = cut(Token::Kind::text, end + 1);
    token.text = token.text.substr(1, end - 1);
    return token;
  }
  size_t length = rest_[0] == '.' ? 1 : 0;
  while (length < rest_.size() && isWordLetter(rest_[length])) ++length;
  if (length == 0 || rest_.substr(0, length) == ".") return cut(Token::Kind::mark, 1);
  return cut(Token::Kind::word, length);
}

std::optional<uint64_t> integer(std::string_view text) {
  int base = 10;
  if (text.ends_with('U') || text.ends_with('u')) text.remove_suffix(1);
  if (text.starts_with("0x") || text.starts_with("0X"))
    base = 16, text.remove_prefix(2);
  else if (text.starts_with("0b") || text.starts_with("0B"))
    base = 2, text.remove_prefix(2);
  else if (text.size() > 1 && text[0] == '0')
    base = 8;
  uint64_t value = 0;
  const auto got = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (got.ec != std::errc() || got.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

// 0: not a type of memory.
uint64_t bytesOfType(std::string_view type) {
  if (type.size() < 3) return 0;
  const std::string_view digits = type.substr(2);
  if (type == ".f16x2" || type == ".bf16x2" || type == ".tf32") return 4;
  if (type == ".bf16") return 2;
  if (std::string_view("bsuf").find(type[1]) == std::string_view::npos) return 0;
  for (uint64_t bits : {8, 16, 32, 64, 128})
    if (integer(digits) == bits) return bits / 8;
  return 0;
}

bool isHeapFunction(std::string_view name) {
  for (std::string_view one : kHeapFunctions)
    if (name == one) return true;
  return false;
}

class Scanner {
 public:
  Scanner(std::string_view text, Contents& contents) : tokens_(text), contents_(contents) {}
  bool run();

 private:
  struct Type {
    uint64_t bytes = 0;  // 0: a texture, surface or sampler
    bool managed = false;
  };
  bool skipNested(std::string_view open, std::string_view close, bool* managed = nullptr);
  bool function();
  bool variables(bool constant, bool external);
  std::optional<Type> type();
  bool declarator(const Type& type, bool constant, bool external);
  bool dimensions(uint64_t& count, bool& open);
  std::optional<uint64_t> initialiser(uint64_t row);

  Tokens tokens_;
  Contents& contents_;
};

// From an opening mark to behind the one that closes it. False: there is none.
bool Scanner::skipNested(std::string_view open, std::string_view close, bool* managed) {
  for (uint64_t depth = 0;;) {
    const Token token = tokens_.take();
    if (token.kind == Token::Kind::end || token.kind == Token::Kind::damaged) return false;
    if (token.is(open)) ++depth;
    if (token.is(close) && --depth == 0) return true;
    if (managed && token.is(".managed")) *managed = true;
  }
}

// Behind .func: what it returns, and its name. The rest is skipped like everything else.
bool Scanner::function() {
  while (tokens_.takeIf(".attribute"))
    if (!skipNested("(", ")")) return false;
  if (tokens_.peek().is("(") && !skipNested("(", ")")) return false;
  if (isHeapFunction(tokens_.peek().text)) contents_.allocates = true;
  return true;
}

// Between .global or .const and the name.
std::optional<Scanner::Type> Scanner::type() {
  Type type;
  uint64_t lanes = 1;
  bool opaque = false;
  while (tokens_.peek().directive()) {
    const Token token = tokens_.take();
    if (token.is(".align")) {
      if (!integer(tokens_.take().text)) return std::nullopt;
    } else if (token.is(".attribute")) {
      if (!tokens_.peek().is("(") || !skipNested("(", ")", &type.managed)) return std::nullopt;
    } else if (token.is(".v2") || token.is(".v4") || token.is(".v8")) {
      lanes = static_cast<uint64_t>(token.text[2] - '0');
    } else if (token.is(".texref") || token.is(".surfref") || token.is(".samplerref")) {
      opaque = true;
    } else {
      type.bytes = bytesOfType(token.text);
      if (type.bytes == 0) return std::nullopt;
    }
  }
  if ((type.bytes == 0) != opaque) return std::nullopt;
  type.bytes *= lanes;
  return type;
}

// [2][3] after the name. `open`: the first is empty, [][3]; `count` is what the others say.
bool Scanner::dimensions(uint64_t& count, bool& open) {
  for (bool first = true; tokens_.takeIf("["); first = false) {
    if (first && tokens_.takeIf("]")) {
      open = true;
      continue;
    }
    const auto size = integer(tokens_.take().text);
    if (!size || !tokens_.takeIf("]")) return false;
    if (*size != 0 && count > kMostBytes / *size) return false;
    count *= *size;
  }
  return true;
}

// Behind '=': how many rows of `row` elements it has, those of inner braces being whole ones.
std::optional<uint64_t> Scanner::initialiser(uint64_t row) {
  uint64_t braces = 0, parentheses = 0, values = 0, rows = 0;
  bool value = false;  // since the last comma or brace
  while (true) {
    const Token& next = tokens_.peek();
    if (next.kind == Token::Kind::end || next.kind == Token::Kind::damaged) return std::nullopt;
    const bool outermost = braces == 0 && parentheses == 0;
    if (outermost && (next.is(";") || next.is(","))) break;
    if (next.is("{")) {
      ++braces;
    } else if (next.is("}")) {
      if (braces-- == 0) return std::nullopt;
      if (braces == 1) ++rows;
      if (braces == 0 && value) ++values;
      value = false;
    } else if (next.is("(")) {
      ++parentheses;
    } else if (next.is(")")) {
      if (parentheses-- == 0) return std::nullopt;
    } else if (next.is(",") && parentheses == 0) {
      if (braces == 1 && value) ++values;
      value = false;
    } else {
      value = true;
    }
    tokens_.take();
  }
  return rows + (row == 0 ? 0 : (values + row - 1) / row);
}

bool Scanner::declarator(const Type& type, bool constant, bool external) {
  const Token name = tokens_.take();
  if (name.kind != Token::Kind::word || name.directive()) return false;
  uint64_t count = 1;
  bool open = false;
  if (!dimensions(count, open)) return false;
  if (tokens_.takeIf("=")) {
    const auto rows = initialiser(count);
    if (!rows || (open && *rows != 0 && count > kMostBytes / *rows)) return false;
    if (open) count *= *rows, open = false;
  }
  if (external || type.bytes == 0) return true;
  if (open || count > kMostBytes / type.bytes) return false;
  contents_.symbols.push_back({.name = std::string(name.text),
                               .bytes = count * type.bytes,
                               .constant = constant,
                               .managed = type.managed});
  return true;
}

bool Scanner::variables(bool constant, bool external) {
  if (tokens_.takeIf("["))  // .const[2]: a bank, in old PTX
    if (!integer(tokens_.take().text) || !tokens_.takeIf("]")) return false;
  const auto common = type();
  if (!common) return false;
  do {
    if (!declarator(*common, constant, external)) return false;
  } while (tokens_.takeIf(","));
  return tokens_.takeIf(";");
}

bool Scanner::run() {
  if (!tokens_.peek().is(".version")) return false;
  for (bool external = false; tokens_.peek().kind != Token::Kind::end;) {
    const Token& next = tokens_.peek();
    if (next.kind == Token::Kind::damaged) return false;
    if (next.is("{")) {  // a function's body, a section
      if (!skipNested("{", "}")) return false;
      external = false;
    } else if (next.is("(")) {  // parameters, which may name spaces
      if (!skipNested("(", ")")) return false;
    } else if (next.is(".global") || next.is(".const")) {
      const bool constant = tokens_.take().is(".const");
      if (!variables(constant, external)) return false;
      external = false;
    } else {
      const Token token = tokens_.take();
      if (token.is(".func") && !function()) return false;
      if (token.is(".extern")) external = true;
      if (token.is(";")) external = false;
    }
  }
  return true;
}

}  // namespace

bool readPtx(std::string_view text, Contents& contents) { return Scanner(text, contents).run(); }

}  // namespace gpupool::fatbin
