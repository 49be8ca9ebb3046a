// Function bodies: declarations, scopes, labels and instructions (PTX ISA 9.0, chapters 4.2, 5 and 9).
#include <charconv>

#include "server/softgpu/ptx/parser_state.h"

namespace gpupool::softgpu::ptx {

void Parser::beginFunction() {
  scopes_.assign(1, Scope{});
  scope_ = 0;
  pendingTargets_.clear();
}

int Parser::addVariable(Variable variable) {
  int index = static_cast<int>(function_->variables.size());
  scopes_[scope_].names[variable.name] = {Symbol::Kind::variable, index};
  function_->variables.push_back(std::move(variable));
  return index;
}

void Parser::body() {
  expectMark('{');
  int depth = 1;
  while (depth > 0) {
    if (peek().kind == TokenKind::end) fail("the text ends inside a function");
    if (takeMark('{')) {
      if (++depth > kMaxScopes) fail("nested too deeply");
      scopes_.push_back({scope_, {}, {}, {}});
      scope_ = static_cast<int>(scopes_.size()) - 1;
    } else if (takeMark('}')) {
      --depth;
      scope_ = depth > 0 ? scopes_[scope_].parent : 0;
    } else {
      statement();
    }
  }
  function_->labelled.resize(function_->instructions.size() + 1, false);
  resolveLabels();
}

void Parser::statement() {
  if (takeMark(';')) return;
  if (peek().kind == TokenKind::dotted) return declaration();
  if (peek().kind == TokenKind::word && atMark(':', 1)) return label();
  instruction();
}

void Parser::declaration() {
  if (takeDotted("reg")) return registers();
  if (takeDotted("param")) return bodyVariables(Space::param);
  if (takeDotted("local")) return bodyVariables(Space::local);
  if (takeDotted("shared")) return bodyVariables(Space::shared);
  if (takeDotted("pragma")) return skipTo(';');
  if (takeDotted("loc") || takeDotted("file")) {
    uint32_t line = tokens_[at_ - 1].line;
    while (peek().kind != TokenKind::end && peek().line == line) take();
    return;
  }
  fail("unsupported declaration in a function");
}

void Parser::registers() {
  Variable type = variableType(Space::local);
  if (type.bytes != std::max(type.type.bytes(), 1u)) fail("vector registers are not supported");
  do {
    std::string_view name = expectWord();
    int first = static_cast<int>(function_->registers.size());
    int count = 1;
    if (takeMark('<')) {
      uint64_t number = expectInteger();
      if (number > kMaxFunctionRegisters) fail("too many registers");
      count = static_cast<int>(number);
      expectMark('>');
      scopes_[scope_].ranges.push_back({name, count, first});
    } else {
      scopes_[scope_].names[name] = {Symbol::Kind::reg, first};
    }
    registerCount_ += static_cast<size_t>(count);
    if (function_->registers.size() + static_cast<size_t>(count) > kMaxFunctionRegisters ||
        registerCount_ > kMaxRegisters)
      fail("too many registers");
    function_->registers.resize(function_->registers.size() + static_cast<size_t>(count), type.type);
  } while (takeMark(','));
  expectMark(';');
}

void Parser::bodyVariables(Space space) {
  Variable common = variableType(space);
  do {
    Variable variable = common;
    declarator(variable);
    if (variable.unsized) fail("an array without a size");
    addVariable(variable);
  } while (takeMark(','));
  expectMark(';');
}

void Parser::label() {
  std::string_view name = expectWord();
  expectMark(':');
  if (takeDotted("branchtargets")) return branchTargets(name);
  if (takeDotted("callprototype")) return callPrototype(name);
  if (takeDotted("calltargets")) return skipTo(';');
  int target = static_cast<int>(function_->instructions.size());
  if (!scopes_[scope_].labels.emplace(name, target).second) fail("a label defined twice");
}

void Parser::branchTargets(std::string_view name) {
  PendingTargets pending{name, scope_, {}};
  do {
    pending.labels.push_back(expectWord());
  } while (takeMark(','));
  expectMark(';');
  pendingTargets_.push_back(std::move(pending));
}

uint32_t Parser::countParameters() {
  expectMark('(');
  uint32_t count = 0;
  while (!takeMark(')')) {
    if (!takeDotted("param") && !takeDotted("reg")) fail("expected .param");
    Variable variable = variableType(Space::param);
    declarator(variable);
    ++count;
    if (!takeMark(',') && !atMark(')')) fail("expected ',' or ')'");
  }
  return count;
}

void Parser::callPrototype(std::string_view name) {
  Prototype prototype;
  if (atMark('(')) prototype.returns = countParameters();
  expectWord();
  if (atMark('(')) prototype.parameters = countParameters();
  skipTo(';');
  function_->prototypes[name] = prototype;
}

void Parser::instruction() {
  Instruction instruction;
  instruction.line = peek().line;
  if (takeMark('@')) {
    instruction.predicateNegated = takeMark('!');
    Operand predicate = operandAtom();
    if (predicate.kind != Operand::Kind::reg) fail("expected a predicate register");
    instruction.predicate = predicate.index;
  }
  instruction.opcode = expectWord();
  while (peek().kind == TokenKind::dotted) instruction.modifiers.push_back(take().text);
  while (!takeMark(';')) {
    instruction.operands.push_back(operand());
    if (atMark(';')) continue;
    if (!takeMark(',') || atMark(';')) fail("expected ',' or ';'");
  }
  markAddressTaken(instruction);
  function_->instructions.push_back(std::move(instruction));
}

// A .param named other than inside [..] or as an argument needs an address.
void Parser::markAddressTaken(const Instruction& instruction) {
  if (instruction.opcode == "call") return;
  for (const Operand& one : instruction.operands)
    if (one.kind == Operand::Kind::variable)
      function_->variables[static_cast<size_t>(one.index)].addressTaken = true;
}

Operand Parser::operand() {
  Operand first = operandAtom();
  if (!takeMark('|')) return first;
  Operand pair;
  pair.kind = Operand::Kind::pair;
  pair.parts.push_back(std::move(first));
  pair.parts.push_back(operandAtom());
  return pair;
}

Operand Parser::operandAtom() {
  Nested nested(*this);
  if (takeMark('!')) {
    Operand inner = operandAtom();
    inner.negated = !inner.negated;
    return inner;
  }
  if (takeMark('-')) return numberOperand(true);
  if (takeMark('~')) {
    Operand inner = numberOperand(false);
    inner.value = ~inner.value;
    return inner;
  }
  if (atMark('[')) return addressOperand();
  Operand result;
  if (takeMark('{')) {
    result.kind = Operand::Kind::vector;
    list(result.parts, '}');
    return result;
  }
  if (takeMark('(')) {
    result.kind = Operand::Kind::list;
    list(result.parts, ')');
    return result;
  }
  if (peek().kind == TokenKind::word) return wordOperand();
  return numberOperand(false);
}

void Parser::list(std::vector<Operand>& into, char close) {
  while (!takeMark(close)) {
    into.push_back(operand());
    if (!takeMark(',') && !atMark(close)) fail("expected ','");
  }
}

Operand Parser::numberOperand(bool negative) {
  Operand result;
  const Token& token = peek();
  if (token.kind == TokenKind::integer) {
    result.kind = Operand::Kind::integer;
    result.value = negative ? ~token.value + 1 : token.value;
  } else if (token.kind == TokenKind::real32) {
    result.kind = Operand::Kind::real32;
    result.value = token.value ^ (negative ? 0x80000000u : 0u);
  } else if (token.kind == TokenKind::real64) {
    result.kind = Operand::Kind::real64;
    result.value = token.value ^ (negative ? uint64_t{1} << 63 : 0u);
  } else {
    fail("expected an operand");
  }
  take();
  return result;
}

Operand Parser::wordOperand() {
  Operand result;
  const Token& token = take();
  std::string_view name = token.text;
  if (name == "_") return result;
  Symbol scratch;
  if (const Symbol* symbol = find(name, scratch)) {
    result.kind = symbol->kind == Symbol::Kind::reg ? Operand::Kind::reg : Operand::Kind::variable;
    result.index = symbol->index;
  } else if (name == "WARP_SZ") {
    result.kind = Operand::Kind::integer;
    result.value = 32;
  } else if (name[0] == '%') {
    result.kind = Operand::Kind::special;
    if (peek().kind == TokenKind::dotted) {
      std::string_view part = take().text;
      name = {name.data(), static_cast<size_t>(part.data() + part.size() - name.data())};
    }
    result.text = name;
    return result;
  } else {
    result.kind = Operand::Kind::symbol;  // a label, perhaps: resolveLabels() knows
    result.index = scope_;
    result.text = name;
  }
  if (result.kind != Operand::Kind::reg) {
    if (atMark('+') && peek(1).kind == TokenKind::integer) take(), result.value = expectInteger();
  }
  return result;
}

Operand Parser::addressOperand() {
  expectMark('[');
  Operand result;
  result.kind = Operand::Kind::address;
  result.parts.push_back(operandAtom());
  while (atMark('+') || atMark('-')) {
    bool negative = take().text[0] == '-';
    uint64_t offset = expectInteger();
    result.value += negative ? ~offset + 1 : offset;
  }
  while (takeMark(',')) result.parts.push_back(operandAtom());
  expectMark(']');
  return result;
}

const Parser::Symbol* Parser::find(std::string_view name, Symbol& scratch) const {
  size_t digits = name.size();
  while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') --digits;
  int number = -1;
  if (digits < name.size()) std::from_chars(name.data() + digits, name.data() + name.size(), number);
  for (int scope = scope_; scope >= 0; scope = scopes_[static_cast<size_t>(scope)].parent) {
    const Scope& one = scopes_[static_cast<size_t>(scope)];
    if (auto found = one.names.find(name); found != one.names.end()) return &found->second;
    if (number < 0) continue;
    for (const RegisterRange& range : one.ranges)
      if (number < range.count && range.prefix == name.substr(0, digits)) {
        scratch = {Symbol::Kind::reg, range.first + number};
        return &scratch;
      }
  }
  return nullptr;
}

int Parser::labelTarget(int scope, std::string_view name) const {
  for (; scope >= 0; scope = scopes_[static_cast<size_t>(scope)].parent) {
    const auto& labels = scopes_[static_cast<size_t>(scope)].labels;
    if (auto found = labels.find(name); found != labels.end()) return found->second;
  }
  return -1;
}

void Parser::resolve(Operand& operand) {
  if (operand.kind == Operand::Kind::symbol) {
    int target = labelTarget(operand.index, operand.text);
    if (target >= 0) {
      operand.kind = Operand::Kind::label;
      operand.index = target;
      function_->labelled[static_cast<size_t>(target)] = true;
    }
  }
  for (Operand& part : operand.parts) resolve(part);
}

void Parser::resolveLabels() {
  for (Instruction& instruction : function_->instructions)
    for (Operand& one : instruction.operands) resolve(one);
  for (const PendingTargets& pending : pendingTargets_)
    for (std::string_view label : pending.labels) {
      int target = labelTarget(pending.scope, label);
      if (target < 0) throw SyntaxError{function_->line, "unknown label " + std::string(label)};
      function_->labelled[static_cast<size_t>(target)] = true;
      function_->branchTargets[pending.name].push_back(target);
    }
}

}  // namespace gpupool::softgpu::ptx
