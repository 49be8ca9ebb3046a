// Textures and surfaces through the functions above the seam (PTX ISA 9.0, chapters 9.7.10 and 9.7.11).
#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/texture.h"

namespace gpupool::softgpu::codegen {

namespace {

// Coordinates of each geometry, and whether a layer comes first.
struct Geometry {
  std::string_view name;
  TextureFetch::Geometry geometry;
  unsigned coordinates;
  bool layered;
};
constexpr Geometry kGeometries[] = {
    {"1d", TextureFetch::Geometry::d1, 1, false},     {"2d", TextureFetch::Geometry::d2, 2, false},
    {"3d", TextureFetch::Geometry::d3, 3, false},     {"a1d", TextureFetch::Geometry::a1, 1, true},
    {"a2d", TextureFetch::Geometry::a2, 2, true},     {"cube", TextureFetch::Geometry::cube, 3, false},
    {"acube", TextureFetch::Geometry::acube, 3, true}};

const Geometry* geometryOf(const ptx::Instruction& instruction) {
  for (const Geometry& one : kGeometries)
    if (instruction.has(one.name)) return &one;
  return nullptr;
}

}  // namespace

void Translator::onTex(const Instruction& instruction) {
  const Geometry* geometry = geometryOf(instruction);
  std::vector<Type> both = types(instruction);
  const auto& operands = instruction.operands;
  bool fits = geometry != nullptr && both.size() == 2 && both[0].bits == 32 && both[0].lanes == 1 &&
              both[1].bits == 32 && instruction.has("v4") && !instruction.has("grad") &&
              operands.size() >= 2 && operands[0].kind == Operand::Kind::vector &&
              operands[0].parts.size() == 4 && operands[1].kind == Operand::Kind::address &&
              operands[1].parts.size() == 2;
  bool hasLevel = instruction.has("level");
  if (!fits || operands.size() > (hasLevel ? 3u : 2u) || (hasLevel && operands.size() < 3))
    unsupported(instruction);
  const Operand& where = operands[1].parts[1];
  std::vector<Operand> coordinates =
      where.kind == Operand::Kind::vector ? where.parts : std::vector<Operand>{where};
  unsigned first = geometry->layered ? 1 : 0;
  if (coordinates.size() < first + geometry->coordinates) unsupported(instruction);
  Value* layer = geometry->layered ? read(coordinates[0], 32) : constant(0);
  Value* at[3] = {constant(0), constant(0), constant(0)};
  for (unsigned i = 0; i < geometry->coordinates; ++i) at[i] = read(coordinates[first + i], 32);
  bool isInteger = both[1].isInteger();
  auto kind = geometry->geometry;
  if (kind == TextureFetch::Geometry::d1 && isInteger) kind = TextureFetch::Geometry::linear1;
  uint32_t flags = static_cast<uint32_t>(kind) | (isInteger ? runtime::kIntegerCoordinates : 0) |
                   (both[0].isInteger() ? runtime::kIntegerResult : 0);
  Value* lod = hasLevel ? read(operands[2], 32) : constant(0);
  if (hasLevel && isInteger) lod = bitsOf(builder_.CreateSIToFP(lod, builder_.getFloatTy()));
  llvm::IRBuilder<> entry(entryBlock_, entryBlock_->begin());
  auto* result = entry.CreateAlloca(llvm::ArrayType::get(integer(32), 4));
  call("gpupool.fetchTexture", builder_.getVoidTy(),
       {read(operands[1].parts[0], 64), constant(flags), at[0], at[1], at[2], layer, lod, result});
  for (unsigned i = 0; i < 4; ++i)
    write(operands[0].parts[i],
          builder_.CreateLoad(integer(32), builder_.CreateConstGEP1_64(integer(32), result, i)));
}

void Translator::onSust(const Instruction& instruction) {
  const Geometry* geometry = geometryOf(instruction);
  const auto& operands = instruction.operands;
  bool isStore = instruction.opcode == "sust";
  const Operand& place = operands.at(isStore ? 0 : 1);
  const Operand& data = operands.at(isStore ? 1 : 0);
  Type type = typeAt(instruction);
  if (geometry == nullptr || !instruction.has("b") || place.kind != Operand::Kind::address ||
      place.parts.size() != 2 || geometry->geometry == TextureFetch::Geometry::cube ||
      geometry->geometry == TextureFetch::Geometry::acube)
    unsupported(instruction);
  unsigned lanes = vectorLanes(instruction);
  const Operand& where = place.parts[1];
  std::vector<Operand> coordinates =
      where.kind == Operand::Kind::vector ? where.parts : std::vector<Operand>{where};
  unsigned first = geometry->layered ? 1 : 0;
  if (coordinates.size() < first + geometry->coordinates) unsupported(instruction);
  Value* at[3] = {constant(0), constant(0), constant(0)};
  for (unsigned i = 0; i < geometry->coordinates; ++i) at[i] = read(coordinates[first + i], 32);
  unsigned dimensions = geometry->coordinates;
  if (geometry->layered) at[dimensions++] = read(coordinates[0], 32);  // a layer is one more coordinate
  uint32_t clamp = instruction.has("clamp") ? 1 : instruction.has("zero") ? 2 : 0;
  llvm::IRBuilder<> entry(entryBlock_, entryBlock_->begin());
  auto* memory = entry.CreateAlloca(llvm::ArrayType::get(integer(8), 16));
  std::vector<Operand> values = data.kind == Operand::Kind::vector ? data.parts : std::vector<Operand>{data};
  if (values.size() != lanes || lanes * type.bytes() > 16) unsupported(instruction);
  auto element = [&](unsigned i) {
    return builder_.CreateConstGEP1_64(integer(8), memory, uint64_t{i} * type.bytes());
  };
  if (isStore)
    for (unsigned i = 0; i < lanes; ++i)
      builder_.CreateAlignedStore(read(values[i], type.bits), element(i), llvm::Align(1));
  call(isStore ? "gpupool.surfaceStore" : "gpupool.surfaceLoad", builder_.getVoidTy(),
       {read(place.parts[0], 64), constant(dimensions), at[0], at[1], at[2], memory,
        constant(uint64_t{lanes} * type.bytes()), constant(clamp)});
  if (!isStore)
    for (unsigned i = 0; i < lanes; ++i)
      write(values[i], builder_.CreateAlignedLoad(integer(type.bits), element(i), llvm::Align(1)));
}

void Translator::onSuld(const Instruction& instruction) { onSust(instruction); }

}  // namespace gpupool::softgpu::codegen
