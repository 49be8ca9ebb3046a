#include "server/worker/tests/stream_program.h"

#include "server/worker/contents.h"
#include "server/worker/tests/mover.h"

#define ROW(name) schema::RowOf<name>::id

namespace gpupool::server::test {
namespace {

constexpr uint64_t kModule = makeHandle(handles::Kind::module, 1, 1);
constexpr uint64_t kArray = makeHandle(handles::Kind::array, 1, 1);
constexpr char kCode[] =
    ".version 9.0\n.target sm_75\n.address_size 64\n.visible .global .align 4 .b8 table[4096];\n";

std::string hexOf(std::span<const std::byte> bytes) {
  std::string text;
  char two[3];
  for (const std::byte byte : contentDigest(bytes)) {
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(byte));
    text += two;
  }
  return text;
}

void fillWith(const transport::SharedMemory& memory, unsigned key) {
  for (size_t i = 0; i < memory.size(); i += 8) memory.data()[i] = static_cast<std::byte>(i / 8 * key);
}

}  // namespace

std::string picture(Session& session) {
  std::string text;
  const auto put = [&](const std::string& name, std::span<const std::byte> bytes) {
    text += name + " " + hexOf(bytes) + "\n";
  };
  const auto memory = [&](const std::string& name, const transport::SharedMemory& memory) {
    put(name, {memory.data(), memory.size()});
  };
  const auto& words = *session.views().words();  // but for the bell
  put("words", std::span(words.data(), words.size()).subspan(schema::kWordsOffset));
  memory("staging", *session.views().staging());
  for (const auto& [address, pinned] : session.space().hostPieces())
    memory("pinned " + std::to_string(address), *pinned);
  session.makeCurrentAgain(kContext);
  const auto stock = session.space().takeStock();
  const auto pieces = session.space().describe();
  for (size_t i = 0; i < stock.size(); ++i) {
    CUdeviceptr address = 0;
    std::vector<std::byte> bytes(stock[i].bytes);
    if (session.space().openPiece(i, address) != CUDA_SUCCESS ||
        session.driver().cuMemcpyDtoH_v2(bytes.data(), address, bytes.size()) != CUDA_SUCCESS)
      text += "a piece cannot be read\n";
    session.space().closePiece(i, address);
    std::string name = "piece " + std::to_string(pieces[i].name);
    for (const auto& mapping : pieces[i].mappings) {
      name += " at " + std::to_string(mapping.address);
      for (const auto& [device, flags] : mapping.access) name += " access " + std::to_string(flags);
    }
    put(name, bytes);
  }
  for (const auto& [owner, context] : session.record().loadedCode()) {
    CUdeviceptr address = 0;
    size_t size = 0;
    if (!findVariable(session, owner, "table", address, size)) continue;
    std::vector<std::byte> bytes(size);
    session.driver().cuMemcpyDtoH_v2(bytes.data(), address, size);
    put("variable at " + std::to_string(address), bytes);
  }
  for (const auto& [id, entry] : session.record().living(handles::Kind::array))
    for (CUarray array : levelsOf(session.driver(), session.objects(), id, 0)) {
      std::vector<std::byte> bytes(arrayBytes(session.driver(), array));
      if (copyArray(session.driver(), array, bytes, true) != CUDA_SUCCESS)
        text += "an array cannot be read\n";
      put("array", bytes);
    }
  text += "streams " + std::to_string(session.record().living(handles::Kind::stream).size()) + " calls " +
          std::to_string(session.record().size()) + "\n";
  const auto numbers = session.numbers();
  text += "frame " + std::to_string(numbers.lastFrame) + " aside " + std::to_string(numbers.lastAside) + "\n";
  for (const uint32_t count : session.objects().named()) text += std::to_string(count) + " ";
  session.driver().cuCtxSetCurrent(nullptr);
  return text + "\n";
}

Program::Program() : client(softDriver(), nullptr, folder.descriptor, &overNetwork) {
  client.open();
  base = client.space().deviceBase;
  makeDeviceMemory();
  pinned = client.space().hostBase + kMiB;
  run(ROW("sessionHostMap"), Arguments().value(pinned).value(kMiB).value(0).value(1));
  fillWith(*client.session->space().hostPieces().at(pinned), 3);
  fillWith(*client.session->views().staging(), 5);
  makeCode();
  makeArray();
  makeGraph();
  makeStreamWord();
}

void Program::run(uint32_t row, const Arguments& arguments) {
  REQUIRE(client.await(row, arguments).status() == CUDA_SUCCESS);
}

// 36 MiB: three parts. Of one piece nobody has an address, of another only a closed one.
void Program::makeDeviceMemory() {
  for (const auto& [at, bytes] : {std::pair{4, 2}, std::pair{8, 30}})
    run(ROW("sessionExtentMap"), Arguments().value(0).value(base + at * kMiB).value(bytes * kMiB));
  for (uint64_t name : {1, 2})
    run(ROW("sessionPhysicalCreate"), Arguments().value(0).value(name).value(2 * kMiB));
  run(ROW("sessionPhysicalMap"), Arguments().value(1).value(base + 64 * kMiB));
  run(ROW("sessionExtentAccess"),
      Arguments().value(base + 64 * kMiB).value(0).value(CU_MEM_ACCESS_FLAGS_PROT_READ));
  for (const auto& [at, megabytes] : {std::pair{4, 2}, std::pair{8, 30}})
    for (int i = 0; i < megabytes; ++i)
      run(ROW("cuMemsetD32Async"),
          Arguments().value(base + (at + i) * kMiB).value(at * 100 + i).value(kMiB / 4).value(0));
  run(ROW("sessionDrain"), Arguments().value(0).value(1));
  Space& space = client.session->space();
  client.session->makeAnyCurrent();
  const auto stock = space.takeStock();
  const auto pieces = space.describe();
  for (size_t i = 0; i < stock.size(); ++i) {
    CUdeviceptr address = 0;
    if (pieces[i].name == 0) continue;
    REQUIRE(space.openPiece(i, address) == CUDA_SUCCESS);
    CHECK(softDriver().cuMemsetD32_v2(address, static_cast<unsigned>(pieces[i].name * 77), kMiB / 2) ==
          CUDA_SUCCESS);
    CHECK(softDriver().cuCtxSynchronize() == CUDA_SUCCESS);
    space.closePiece(i, address);
  }
  softDriver().cuCtxSetCurrent(nullptr);
}

// Two modules of one image.
void Program::makeCode() {
  const auto code = std::as_bytes(std::span(kCode));
  const Digest digest = contentDigest(code);
  schema::ImageName name;
  std::memcpy(name.words, digest.data(), sizeof name.words);
  name.bytes = code.size();
  for (uint64_t i = 0; i < 2; ++i) {
    const uint64_t module = makeHandle(handles::Kind::module, 1 + i, 1);
    run(ROW("sessionImageOffer"), Arguments().structure(name).value(1));
    if (i == 0)
      client.post(ROW("sessionImageData"),
                  Arguments().structure(name).value(0).blob(code.data(), code.size()).value(code.size()));
    run(ROW("sessionModuleLoad"), Arguments()
                                      .value(module)
                                      .structure(name)
                                      .value(0)
                                      .blob(nullptr, 0)
                                      .blob(nullptr, 0)
                                      .value(0)
                                      .value(0)
                                      .value(0)
                                      .value(0)
                                      .value(0)
                                      .value(1));
    run(ROW("cuModuleGetGlobal_v2"), Arguments().value(1).value(1).value(module).blob("table", 5));
    CUdeviceptr address = 0;
    size_t bytes = 0;
    client.session->makeAnyCurrent();
    REQUIRE(findVariable(*client.session, module, "table", address, bytes));
    CHECK(softDriver().cuMemsetD8_v2(address, static_cast<unsigned char>(31 + i), bytes) == CUDA_SUCCESS);
    softDriver().cuCtxSetCurrent(nullptr);
  }
}

void Program::makeArray() {
  const CUDA_ARRAY_DESCRIPTOR shape{300, 70, CU_AD_FORMAT_FLOAT, 2};
  run(ROW("cuArrayCreate_v2"), Arguments().value(kArray).value(1).structure(shape));
  CUarray array = nullptr;
  REQUIRE(client.session->objects().find(kArray, array));
  std::vector<std::byte> bytes(size_t{300} * 70 * 8);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 13);
  client.session->makeAnyCurrent();
  REQUIRE(copyArray(softDriver(), array, bytes, false) == CUDA_SUCCESS);
  softDriver().cuCtxSetCurrent(nullptr);
}

void Program::makeGraph() {
  run(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0));
  run(ROW("cuStreamBeginCapture_v2"), Arguments().value(kStream).value(0));
  run(ROW("cuMemsetD8Async"), Arguments().value(base + 4 * kMiB).value(kGraphByte).value(64).value(kStream));
  const auto captured = client.await(ROW("cuStreamEndCapture"), Arguments().value(kStream).value(1));
  REQUIRE(captured.status() == CUDA_SUCCESS);
  uint64_t graph = 0;
  std::memcpy(&graph, captured.outputs.data(), sizeof graph);
  run(ROW("sessionGraphInstantiate"), Arguments().value(kExec).value(graph).value(0).value(0).value(1));
}

void Program::makeStreamWord() {
  client.post(ROW("sessionWord"), Arguments().value(kStream).value(5).value(7));
  run(ROW("sessionDrain"), Arguments().value(0).value(1));
  REQUIRE(client.word(5) == 7);
}

Program& theProgram() {
  static std::unique_ptr<Program> program = std::make_unique<Program>();
  return *program;
}

}  // namespace gpupool::server::test
