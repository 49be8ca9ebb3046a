#pragma once
// The parser's internals, shared by parser.cpp (directives) and instruction_parser.cpp (function bodies).

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "server/softgpu/ptx/lexer.h"
#include "server/softgpu/ptx/module.h"

namespace gpupool::softgpu::ptx {

class Parser {
 public:
  explicit Parser(std::string_view source);
  Module run();

 private:
  // ---- tokens
  const Token& peek(size_t ahead = 0) const;
  const Token& take();
  bool atMark(char c, size_t ahead = 0) const;
  bool takeMark(char c);
  void expectMark(char c);
  bool takeDotted(std::string_view text);
  std::string_view expectWord();
  uint64_t expectInteger();
  void skipTo(char mark);
  void skipBraces();
  [[noreturn]] void fail(const std::string& what) const;

  // Text decides how deep braces nest; the stack has an end.
  static constexpr int kMaxDepth = 64;
  static constexpr int kMaxScopes = 256;  // a name is looked up in all of them
  struct Nested {
    explicit Nested(Parser& parser) : depth(parser.depth_) {
      if (++depth > kMaxDepth) parser.fail("nested too deeply");
    }
    ~Nested() { --depth; }
    Nested(const Nested&) = delete;
    int& depth;
  };
  // A declaration of a few bytes may ask for any number.
  static constexpr size_t kMaxFunctionRegisters = size_t{1} << 22, kMaxRegisters = size_t{1} << 24;

  // ---- module level (parser.cpp)
  struct Linkage {
    bool visible = false;
    bool external = false;
    bool weak = false;
  };
  void directive();
  void target();
  void functionDirective(bool entry, Linkage linkage);
  void functionAttributes(Function& function);
  void parameterList(std::vector<int>& into);
  void moduleVariables(Space space, Linkage linkage);
  Variable variableType(Space space);
  void declarator(Variable& variable);
  void initialiser(Variable& variable);
  void initialiserValues(Variable& variable, uint64_t& offset);
  void initialiserValue(Variable& variable, uint64_t& offset);

  // ---- function bodies (instruction_parser.cpp)
  struct Symbol {
    enum class Kind : uint8_t { reg, variable } kind;
    int index;
  };
  struct RegisterRange {
    std::string_view prefix;
    int count;
    int first;
  };
  struct Scope {
    int parent = -1;
    std::unordered_map<std::string_view, Symbol> names;
    std::vector<RegisterRange> ranges;
    std::unordered_map<std::string_view, int> labels;
  };
  void beginFunction();
  void body();
  void statement();
  void declaration();
  void registers();
  void bodyVariables(Space space);
  void label();
  void branchTargets(std::string_view name);
  void callPrototype(std::string_view name);
  uint32_t countParameters();
  void instruction();
  Operand operand();
  Operand operandAtom();
  Operand wordOperand();
  Operand addressOperand();
  Operand numberOperand(bool negative);
  void list(std::vector<Operand>& into, char close);
  const Symbol* find(std::string_view name, Symbol& scratch) const;
  int addVariable(Variable variable);
  void resolveLabels();
  void resolve(Operand& operand);
  void markAddressTaken(const Instruction& instruction);
  int labelTarget(int scope, std::string_view name) const;

  Module module_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  size_t registerCount_ = 0;  // of all functions

  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
  int scope_ = 0;
  struct PendingTargets {
    std::string_view name;
    int scope;
    std::vector<std::string_view> labels;
  };
  std::vector<PendingTargets> pendingTargets_;
};

}  // namespace gpupool::softgpu::ptx
