#include "server/softgpu/ptx/parser.h"

#include <bit>

#include "server/softgpu/ptx/parser_state.h"

namespace gpupool::softgpu::ptx {

Type typeOf(std::string_view word) {
  struct Row {
    std::string_view name;
    Type type;
  };
  static constexpr Row kRows[] = {
      {"u32", {Kind::uns, 32}},      {"s32", {Kind::sig, 32}},
      {"b32", {Kind::bits, 32}},     {"f32", {Kind::real, 32}},
      {"u64", {Kind::uns, 64}},      {"s64", {Kind::sig, 64}},
      {"b64", {Kind::bits, 64}},     {"f64", {Kind::real, 64}},
      {"u16", {Kind::uns, 16}},      {"s16", {Kind::sig, 16}},
      {"b16", {Kind::bits, 16}},     {"f16", {Kind::real, 16}},
      {"u8", {Kind::uns, 8}},        {"s8", {Kind::sig, 8}},
      {"b8", {Kind::bits, 8}},       {"pred", {Kind::predicate, 1}},
      {"bf16", {Kind::bfloat, 16}},  {"f16x2", {Kind::real, 32, 2}},
      {"b128", {Kind::bits, 128}},   {"bf16x2", {Kind::bfloat, 32, 2}},
      {"tf32", {Kind::tf32, 32}},    {"u16x2", {Kind::uns, 32, 2}},
      {"s16x2", {Kind::sig, 32, 2}},
  };
  for (const Row& row : kRows)
    if (row.name == word) return row.type;
  return {};
}

Parser::Parser(std::string_view source) {
  module_.source = std::make_unique<std::string>(source);
  tokens_ = tokenize(*module_.source);
}

Module parse(std::string_view source) { return Parser(source).run(); }

// ---- tokens ----
const Token& Parser::peek(size_t ahead) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }

const Token& Parser::take() {
  const Token& token = peek();
  if (at_ + 1 < tokens_.size()) ++at_;
  return token;
}

bool Parser::atMark(char c, size_t ahead) const {
  const Token& token = peek(ahead);
  return token.kind == TokenKind::mark && token.text[0] == c;
}

bool Parser::takeMark(char c) {
  if (!atMark(c)) return false;
  take();
  return true;
}

void Parser::expectMark(char c) {
  if (!takeMark(c)) fail(std::string("expected '") + c + "'");
}

bool Parser::takeDotted(std::string_view text) {
  if (peek().kind != TokenKind::dotted || peek().text != text) return false;
  take();
  return true;
}

std::string_view Parser::expectWord() {
  if (peek().kind != TokenKind::word) fail("expected a name");
  return take().text;
}

uint64_t Parser::expectInteger() {
  bool negative = takeMark('-');
  if (peek().kind != TokenKind::integer) fail("expected an integer");
  uint64_t value = take().value;
  return negative ? ~value + 1 : value;
}

void Parser::skipTo(char mark) {
  while (!atMark(mark)) {
    if (peek().kind == TokenKind::end) fail(std::string("the text ends before '") + mark + "'");
    take();
  }
  take();
}

void Parser::skipBraces() {
  expectMark('{');
  for (int depth = 1; depth > 0;) {
    if (peek().kind == TokenKind::end) fail("the text ends inside braces");
    if (atMark('{')) ++depth;
    if (atMark('}')) --depth;
    take();
  }
}

void Parser::fail(const std::string& what) const {
  std::string found = peek().kind == TokenKind::end ? "the end" : "'" + std::string(peek().text) + "'";
  throw SyntaxError{peek().line, what + " at " + found};
}

// ---- module level ----
Module Parser::run() {
  while (peek().kind != TokenKind::end) directive();
  return std::move(module_);
}

void Parser::directive() {
  if (takeMark(';')) return;
  Linkage linkage;
  while (true) {
    if (takeDotted("visible"))
      linkage.visible = true;
    else if (takeDotted("extern"))
      linkage.external = true;
    else if (takeDotted("weak") || takeDotted("common"))
      linkage.visible = linkage.weak = true;
    else
      break;
  }
  if (takeDotted("entry")) return functionDirective(true, linkage);
  if (takeDotted("func")) return functionDirective(false, linkage);
  if (takeDotted("global")) return moduleVariables(Space::global, linkage);
  if (takeDotted("const")) return moduleVariables(Space::constant, linkage);
  if (takeDotted("shared")) return moduleVariables(Space::shared, linkage);
  if (takeDotted("target")) return target();
  if (takeDotted("version")) {
    const Token& version = take();
    size_t dot = version.text.find('.');
    if (dot == std::string_view::npos) fail("expected a version");
    for (char c : version.text)
      if (c != '.') module_.version = module_.version * 10 + static_cast<uint32_t>(c - '0');
    return;
  }
  if (takeDotted("address_size")) {
    if (expectInteger() != 64) fail("only .address_size 64 is supported");
    return;
  }
  if (takeDotted("pragma") || takeDotted("alias")) return skipTo(';');
  if (takeDotted("file") || takeDotted("loc")) {
    uint32_t line = tokens_[at_ - 1].line;
    while (peek().kind != TokenKind::end && peek().line == line) take();
    return;
  }
  if (takeDotted("section")) {
    take();
    return skipBraces();
  }
  fail("unknown directive");
}

void Parser::target() {
  uint32_t line = peek().line;
  while (peek().kind != TokenKind::end && peek().line == line) {
    std::string_view text = take().text;
    if (!text.starts_with("sm_")) continue;
    module_.target = 0;
    for (char c : text.substr(3))
      if (c >= '0' && c <= '9') module_.target = module_.target * 10 + static_cast<uint32_t>(c - '0');
  }
}

void Parser::functionDirective(bool entry, Linkage linkage) {
  Function function;
  function.entry = entry;
  function.visible = linkage.visible;
  function.weak = linkage.weak;
  function.line = peek().line;
  function_ = &function;
  beginFunction();
  while (takeDotted("attribute")) skipTo(')');
  if (!entry && atMark('(')) parameterList(function.returns);
  function.name = expectWord();
  if (atMark('(')) parameterList(function.parameters);
  functionAttributes(function);
  if (!takeMark(';')) {
    function.defined = true;
    body();
  }
  module_.functions.push_back(std::move(function));
  function_ = nullptr;
}

void Parser::functionAttributes(Function& function) {
  while (peek().kind == TokenKind::dotted) {
    std::string_view name = take().text;
    if (name == "pragma") {
      skipTo(';');
      continue;
    }
    std::vector<uint64_t> numbers;
    while (peek().kind == TokenKind::integer) {
      numbers.push_back(expectInteger());
      if (!takeMark(',')) break;
    }
    if (name == "maxntid" || name == "reqntid") {
      uint64_t product = 1;
      for (uint64_t one : numbers) product *= one;
      function.maxThreads = static_cast<uint32_t>(product);
    }
  }
}

void Parser::parameterList(std::vector<int>& into) {
  expectMark('(');
  while (!takeMark(')')) {
    bool inRegister = takeDotted("reg");
    if (!inRegister && !takeDotted("param")) fail("expected .param or .reg");
    Variable variable = variableType(Space::param);
    declarator(variable);
    if (inRegister) {
      variable.inRegister = true;
      variable.reg = static_cast<int>(function_->registers.size());
      function_->registers.push_back(variable.type);
      scopes_[0].names[variable.name] = {Symbol::Kind::reg, variable.reg};
      function_->variables.push_back(variable);
      into.push_back(static_cast<int>(function_->variables.size()) - 1);
    } else {
      into.push_back(addVariable(variable));
    }
    if (!takeMark(',') && !atMark(')')) fail("expected ',' or ')'");
  }
}

void Parser::moduleVariables(Space space, Linkage linkage) {
  Variable common = variableType(space);
  common.external = linkage.external;
  common.visible = linkage.visible;
  common.weak = linkage.weak;
  do {
    Variable variable = common;
    declarator(variable);
    if (takeMark('=')) initialiser(variable);
    if (variable.unsized && !(space == Space::shared || variable.external)) fail("an array without a size");
    module_.variables.push_back(std::move(variable));
  } while (takeMark(','));
  expectMark(';');
}

// The part of a declaration before the name; for vectors the element type with the size of the whole.
Variable Parser::variableType(Space space) {
  Variable variable;
  variable.space = space;
  uint32_t lanes = 1;
  uint32_t alignment = 0;
  while (peek().kind == TokenKind::dotted) {
    std::string_view word = peek().text;
    if (word == "align") {
      take();
      alignment = static_cast<uint32_t>(expectInteger());
      if (!std::has_single_bit(alignment) || alignment > 65536) fail("bad alignment");
    } else if (word == "attribute") {
      take();
      expectMark('(');
      if (peek().text == "managed") variable.managed = true;
      skipTo(')');
    } else if (word == "v2" || word == "v4") {
      take();
      lanes = word == "v2" ? 2 : 4;
    } else if (word == "ptr") {
      take();
      while (peek().text == "global" || peek().text == "shared" || peek().text == "const" ||
             peek().text == "local")
        take();
      if (takeDotted("align")) expectInteger();
    } else if (typeOf(word).kind != Kind::none) {
      take();
      variable.type = typeOf(word);
    } else {
      fail("unsupported declaration");
    }
  }
  if (variable.type.kind == Kind::none) fail("expected a type");
  variable.bytes = uint64_t{std::max(variable.type.bytes(), 1u)} * lanes;
  variable.alignment = alignment != 0 ? alignment : static_cast<uint32_t>(variable.bytes);
  return variable;
}

void Parser::declarator(Variable& variable) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 40;
  variable.name = expectWord();
  while (takeMark('[')) {
    if (takeMark(']')) {
      variable.unsized = true;
      continue;
    }
    uint64_t count = expectInteger();
    if (count != 0 && variable.bytes > kMaxBytes / count) fail("an array too large");
    variable.bytes *= count;
    expectMark(']');
  }
}

void Parser::initialiser(Variable& variable) {
  uint64_t offset = 0;
  if (atMark('{'))
    initialiserValues(variable, offset);
  else
    initialiserValue(variable, offset);
  if (variable.unsized) {
    variable.bytes = offset;
    variable.unsized = false;
  }
  if (offset > variable.bytes) fail("an initialiser larger than its variable");
}

void Parser::initialiserValues(Variable& variable, uint64_t& offset) {
  Nested nested(*this);
  expectMark('{');
  while (!takeMark('}')) {
    if (atMark('{'))
      initialiserValues(variable, offset);
    else
      initialiserValue(variable, offset);
    if (!takeMark(',') && !atMark('}')) fail("expected ',' or '}'");
  }
}

void Parser::initialiserValue(Variable& variable, uint64_t& offset) {
  Initialiser one;
  one.offset = offset;
  one.bytes = static_cast<uint8_t>(std::max(variable.type.bytes(), 1u));
  bool negative = takeMark('-');
  const Token& token = take();
  if (token.kind == TokenKind::integer && atMark('(')) {  // 0xFF00(symbol): one byte of an address
    take();
    if (token.value == 0) fail("a mask of no byte");
    one.shift = static_cast<uint8_t>(std::countr_zero(token.value));
    bool generic = peek().text == "generic";
    if (generic) take(), expectMark('(');
    one.symbol = expectWord();
    if (takeMark('+')) one.value = expectInteger();
    if (generic) expectMark(')');
    if (takeMark('+')) one.value += expectInteger();
    expectMark(')');
  } else if (token.kind == TokenKind::integer) {
    one.value = negative ? ~token.value + 1 : token.value;
    if (variable.type.isReal()) {
      double number = static_cast<double>(static_cast<int64_t>(one.value));
      one.value = variable.type.bits == 64 ? std::bit_cast<uint64_t>(number)
                                           : std::bit_cast<uint32_t>(static_cast<float>(number));
    }
  } else if (token.kind == TokenKind::real32 || token.kind == TokenKind::real64) {
    one.value = token.value;
    if (token.kind == TokenKind::real64 && variable.type.bits == 32)
      one.value = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(token.value)));
    if (negative) one.value ^= uint64_t{1} << (variable.type.bits - 1);
  } else if (token.kind == TokenKind::word) {
    bool generic = token.text == "generic" && takeMark('(');
    one.symbol = generic ? expectWord() : token.text;
    if (generic) expectMark(')');
    if (takeMark('+'))
      one.value = expectInteger();
    else if (takeMark('-'))
      one.value = ~expectInteger() + 1;
  } else {
    fail("expected a value");
  }
  if (one.value != 0 || !one.symbol.empty()) variable.initialisers.push_back(one);
  offset += one.bytes;
}

}  // namespace gpupool::softgpu::ptx
