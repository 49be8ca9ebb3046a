#pragma once
// One PTX function -> one LLVM function. An instruction without a translation throws Problem.
//
// Kernels become `void (ThreadContext*, BlockContext*)`: a loop that takes the block's next thread until none
// is left. Device functions become `void (ThreadContext*, return pointers..., parameter pointers...)`: .param
// space of a call is memory of the caller, which the optimiser dissolves after inlining.
//
// Addresses: global, const, local and generic are plain addresses; shared is an offset from the block's base.

#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/LLVMContext.h>
#include <llvm/IR/Module.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/softgpu/codegen/program.h"

namespace gpupool::softgpu::codegen {}  // namespace gpupool::softgpu::codegen

namespace gpupool::softgpu::runtime {
enum class MbarrierOperation : uint32_t;
}

namespace gpupool::softgpu::codegen {

struct HostFeatures {
  bool f16c = false;
};

std::string functionName(const Program& program, FunctionId id);

class Translator {
 public:
  Translator(const Program& program, FunctionId id, const SharedLayout& shared, llvm::Module& module,
             HostFeatures features);
  llvm::Function* run();

 private:
  using Value = llvm::Value;
  using Instruction = ptx::Instruction;
  using Operand = ptx::Operand;
  using Type = ptx::Type;
  using Handler = void (Translator::*)(const Instruction&);
  static const std::unordered_map<std::string_view, Handler>& handlers();

  // ---- frame (translate_function.cpp)
  void prologue();
  void kernelPrologue();
  void frameVariables();
  void translateBody();
  void translate(const Instruction& instruction);
  void predicated(const Instruction& instruction, Handler handler);
  void leaveThread();
  bool isSpinLoop(int from, int to) const;
  void countWaits();
  llvm::BasicBlock* newBlock(const char* name = "");
  void startBlock(llvm::BasicBlock* block);
  [[noreturn]] void unsupported(const Instruction& instruction, std::string_view why = "") const;

  // ---- values (translate_values.cpp)
  llvm::Type* integer(unsigned bits) { return builder_.getIntNTy(bits); }
  llvm::Type* registerType(Type type);
  llvm::Type* realType(const Instruction& instruction, Type type);
  llvm::AllocaInst* registerSlot(int index);
  Value* readRegister(int index);
  Value* bitsOf(Value* value);                         // as an integer of the same width
  Value* read(const Operand& operand, unsigned bits);  // as an integer
  Value* readSigned(const Operand& operand, unsigned bits) { return read(operand, bits); }
  Value* readReal(const Operand& operand, unsigned bits);
  Value* readPredicate(const Operand& operand);
  Value* constantOf(const Operand& operand, unsigned bits);
  Value* addressOfSymbol(const Operand& operand);
  void write(const Operand& operand, Value* value, bool signExtend = false);
  Value* special(std::string_view name, unsigned bits);
  Value* blockField(size_t offset, llvm::Type* type);
  Value* threadField(size_t offset, llvm::Type* type);
  Value* threadPointer(size_t offset);
  Value* tid(unsigned axis);
  Value* linearThread();
  Value* constant(uint64_t value, unsigned bits = 32) { return builder_.getIntN(bits, value); }
  Value* call(const char* name, llvm::Type* result, std::initializer_list<Value*> arguments,
              bool pure = false);
  llvm::Function* intrinsic(llvm::Intrinsic::ID id, std::initializer_list<llvm::Type*> types);
  Value* intrinsicCall(llvm::Intrinsic::ID id, std::initializer_list<llvm::Type*> types,
                       std::initializer_list<Value*> arguments);
  Type typeAt(const Instruction& instruction, size_t fromEnd = 0) const;
  std::vector<Type> types(const Instruction& instruction) const;

  // ---- small floats (translate_half.cpp)
  Value* smallToFloat(Value* bits, ptx::Kind kind);
  Value* floatToSmall(Value* value, ptx::Kind kind, std::string_view rounding = "rn");
  Value* mapLanes(Type type, const std::vector<Value*>& operands,
                  const std::function<Value*(const std::vector<Value*>&)>& one);
  Value* smallArithmetic(const Instruction& instruction, Type type, std::string_view opcode,
                         const std::vector<Value*>& operands);
  Value* smallFma(Value* a, Value* b, Value* c, ptx::Kind kind);
  Value* flushSmall(Value* bits);
  Value* saturateSmall(Value* bits, ptx::Kind kind);
  Value* isNanSmall(Value* bits, ptx::Kind kind);

  // ---- floats (translate_float.cpp)
  Value* flush(Value* value, bool really);
  Value* saturate(Value* value);
  static std::string_view roundingOf(const Instruction& instruction);
  Value* roundedCall(std::string_view name, std::string_view rounding, unsigned bits,
                     std::initializer_list<Value*> arguments);
  Value* minMax(const Instruction& instruction, Value* a, Value* b, bool maximum);
  Value* absolute(Value* value);
  Value* compareReal(std::string_view comparison, Value* a, Value* b);
  Value* compareInteger(std::string_view comparison, Value* a, Value* b, bool isSigned);
  Value* compare(const Instruction& instruction, std::string_view comparison, Type type);
  Value* combine(const Instruction& instruction, Value* result, const Operand& with);

  // ---- memory (translate_memory.cpp)
  struct Address {
    Value* pointer = nullptr;
    bool isPrivate = false;  // no other OS thread reaches it: atomics need no lock
  };
  ptx::Space spaceOf(const Instruction& instruction) const;
  Address address(const Instruction& instruction, const Operand& operand, ptx::Space space, unsigned bytes);
  Address parameterAddress(const Instruction& instruction, const Operand& operand, unsigned bytes);
  Value* baseOf(const Operand& operand, unsigned bits);
  Value* checkedPointer(Value* address, unsigned bytes, const Operand* operand = nullptr);
  Value* sharedPointer(const Operand& operand, unsigned bytes);
  void faultIf(Value* condition, Value* address, uint64_t bytes);
  Value* pointer(Value* address);
  unsigned vectorLanes(const Instruction& instruction) const;
  llvm::AtomicOrdering ordering(const Instruction& instruction) const;
  // The type of an access that is done at once; null: each of its elements by itself.
  llvm::Type* wholeVector(const Instruction& instruction, Type type, bool isPrivate);
  std::vector<llvm::Value*> loadWhole(const Instruction& instruction, llvm::Type* vector, Value* from,
                                      unsigned bytes);
  void storeWhole(const Instruction& instruction, llvm::Type* vector, Value* to, unsigned bytes);
  Value* atomicUpdate(const Address& at, llvm::Type* type, const std::function<Value*(Value*)>& update);
  Value* atomicResult(const Instruction& instruction, const Address& at, Type type, size_t first);
  Value* atomicRmw(const Instruction& instruction, llvm::AtomicRMWInst::BinOp operation, const Address& at,
                   Value* value);
  void atomicVector(const Instruction& instruction, ptx::Space space, Type type, unsigned lanes);

  // ---- asynchronous copies (translate_async.cpp)
  Value* mbarrierCall(runtime::MbarrierOperation operation, Value* object, Value* operand);
  void copy(const Instruction& instruction);
  void bulk(const Instruction& instruction);

  // ---- matrices (translate_matrix.cpp)
  Value* fragmentMemory(unsigned role, const Operand* fill, unsigned bits);
  void readFragment(const Operand& operand, Value* memory, unsigned bits);
  Value* matrixAddress(const Instruction& instruction, const Operand& operand);
  void matrixLoad(const Instruction& instruction);
  void matrixStore(const Instruction& instruction);

  // ---- integers with carry (translate_integer.cpp)
  llvm::AllocaInst* carry();
  Value* loadCarry(unsigned bits);
  Value* fieldBound(const Operand& operand, unsigned bits);
  Value* videoLane(const Instruction& instruction, Value* a, Value* b);

  // ---- conversions (translate_convert.cpp)
  Value* realSource(const Instruction& instruction, Type type, Value* bits);
  Value* toInteger(const Instruction& instruction, Value* value, Type to, Type from);
  Value* integerToReal(const Instruction& instruction, Value* value, Type to, Type from);
  Value* realToReal(const Instruction& instruction, Value* value, Type to, Type from);
  Value* integerToInteger(const Instruction& instruction, Value* value, Type to, Type from);
  bool convertPacked(const Instruction& instruction, Type to, Type from);

  // ---- warps and blocks (translate_sync.cpp)
  Value* warpCall(unsigned operation, Value* mask, Value* value, Value* b = nullptr, Value* c = nullptr);
  Value* activeMaskHere(const Instruction& instruction);

  // ---- calls (translate_control.cpp)
  void builtinCall(const Instruction& instruction, std::string_view name, const std::vector<Value*>& returns,
                   const std::vector<Value*>& arguments);
  std::vector<Value*> argumentPointers(const Instruction& instruction, const Operand& list);
  void branchTo(const Instruction& instruction, int target, Value* condition);

  // ---- handlers
#define GPUPOOL_PTX_HANDLER(opcode, method) void method(const Instruction& instruction);
#include "server/softgpu/codegen/handlers.inc"
#undef GPUPOOL_PTX_HANDLER

  const Program& program_;
  FunctionId id_;
  const ptx::Function& source_;
  const FunctionFacts& facts_;
  const SharedLayout& shared_;
  llvm::Module& module_;
  llvm::LLVMContext& context_;
  HostFeatures features_;
  llvm::IRBuilder<> builder_;

  llvm::Function* function_ = nullptr;
  Value* thread_ = nullptr;
  Value* block_ = nullptr;
  Value* tids_[3] = {};  // kernels only
  Value* linear_ = nullptr;
  Value* frame_ = nullptr;                  // local memory of this function, an address
  llvm::BasicBlock* entryBlock_ = nullptr;  // allocas go here
  llvm::BasicBlock* exitBlock_ = nullptr;
  llvm::BasicBlock* faultBlock_ = nullptr;
  llvm::PHINode* faultAddress_ = nullptr;
  llvm::PHINode* faultBytes_ = nullptr;
  std::vector<llvm::AllocaInst*> registers_;
  std::vector<Value*> variables_;       // pointers to .param memory; null for others
  std::vector<uint32_t> frameOffsets_;  // of .local variables
  std::vector<uint32_t> waits_;         // before instruction i: how many so far may wait for another thread
  std::unordered_map<int, llvm::BasicBlock*> labels_;
  llvm::AllocaInst* carry_ = nullptr;
  llvm::AllocaInst* fragments_[5] = {};  // a, b, c, d and the descriptor of a matrix instruction
  int current_ = 0;
  // Addresses checked since the block began: register -> offset and size of the first check.
  struct Checked {
    int64_t offset;
    unsigned bytes;
  };
  std::unordered_map<int, Checked> checked_;
};

}  // namespace gpupool::softgpu::codegen
