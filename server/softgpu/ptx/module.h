#pragma once
// A parsed PTX module: names resolved to registers, variables and labels, instructions still in PTX's own
// words. Views point into the module's own copy of the source.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gpupool::softgpu::ptx {

enum class Kind : uint8_t { bits, uns, sig, real, bfloat, tf32, predicate, none };

// A fundamental type: .b8 .. .b128, .u*, .s*, .f16/.f32/.f64, .bf16, the packed x2 types (lanes = 2), .pred.
struct Type {
  Kind kind = Kind::none;
  uint8_t bits = 0;  // of the whole value: 32 for .f16x2
  uint8_t lanes = 1;
  constexpr bool operator==(const Type&) const = default;
  uint32_t bytes() const { return bits / 8u; }
  bool isSigned() const { return kind == Kind::sig; }
  bool isInteger() const { return kind == Kind::bits || kind == Kind::uns || kind == Kind::sig; }
  bool isReal() const { return kind == Kind::real || kind == Kind::bfloat; }
};

// "u32" -> {uns, 32}; Kind::none when `word` is no type.
Type typeOf(std::string_view word);

enum class Space : uint8_t { generic, global, shared, local, constant, param };

constexpr int kNoRegister = -1;
constexpr int kNoVariable = -1;

struct Operand {
  enum class Kind : uint8_t {
    reg,       // index
    special,   // text: "%tid.x"
    variable,  // index into Function::variables, + value
    symbol,    // text: a module variable or function, + value
    label,     // index of an instruction
    integer,   // value
    real32,    // value: bits
    real64,    // value: bits
    address,   // parts[0] is the base (reg, variable, symbol or integer), value the offset, parts[1..] the
               // rest of a [..]
    vector,    // { parts }
    list,      // ( parts )
    pair,      // parts[0] | parts[1]
    sink,      // _
  };
  Kind kind = Kind::sink;
  bool negated = false;  // !p
  int index = -1;
  uint64_t value = 0;
  std::string_view text;
  std::vector<Operand> parts;
};

// PTX text decides how many operands there are: every access is checked (std::out_of_range).
struct Operands : std::vector<Operand> {
  const Operand& operator[](size_t i) const { return at(i); }
  Operand& operator[](size_t i) { return at(i); }
};

struct Instruction {
  uint32_t line = 0;
  int predicate = kNoRegister;
  bool predicateNegated = false;
  std::string_view opcode;
  std::vector<std::string_view> modifiers;
  Operands operands;

  bool has(std::string_view modifier) const {
    for (auto one : modifiers)
      if (one == modifier) return true;
    return false;
  }
};

// One piece of an initialiser: `bytes` bytes at `offset` hold the number, or the address of `symbol` plus
// `value`, shifted right by `shift` bits (0xFF00(symbol) is one byte, shift 8).
struct Initialiser {
  uint64_t offset = 0;
  uint64_t value = 0;
  uint8_t bytes = 0;
  uint8_t shift = 0;
  std::string_view symbol;
};

struct Variable {
  std::string_view name;
  Space space = Space::global;
  Type type;
  uint32_t alignment = 1;
  uint64_t bytes = 0;
  bool external = false;
  bool visible = false;  // .visible, .weak or .common: found by other modules
  bool weak = false;
  bool managed = false;
  bool unsized = false;       // extern .shared x[]: the launch's dynamic shared memory
  bool inRegister = false;    // a .reg parameter of a .func
  bool addressTaken = false;  // of a .param: it then needs memory that generic addresses reach
  int reg = kNoRegister;      // inRegister: which one
  std::vector<Initialiser> initialisers;
};

struct Prototype {
  uint32_t returns = 0;
  uint32_t parameters = 0;
};

struct Function {
  std::string_view name;
  uint32_t line = 0;
  bool entry = false;
  bool visible = false;
  bool weak = false;
  bool defined = false;
  uint32_t maxThreads = 0;
  std::vector<int> returns;     // indices into variables
  std::vector<int> parameters;  // indices into variables
  std::vector<Type> registers;
  std::vector<Variable> variables;  // parameters, returns, and everything declared inside
  std::vector<Instruction> instructions;
  std::vector<bool> labelled;  // an instruction (or the end) that some label names
  std::unordered_map<std::string_view, std::vector<int>>
      branchTargets;  // .branchtargets: instruction indices
  std::unordered_map<std::string_view, Prototype> prototypes;
};

struct Module {
  std::unique_ptr<std::string> source;
  uint32_t version = 0;  // 90 for 9.0
  uint32_t target = 0;   // 75 for sm_75
  std::vector<Variable> variables;
  std::vector<Function> functions;
};

}  // namespace gpupool::softgpu::ptx
