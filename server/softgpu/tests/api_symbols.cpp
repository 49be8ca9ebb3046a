// The variables that are read of a code image (server/fatbin/symbols.h) are those that the driver finds.
#include <fstream>
#include <iterator>
#include <string>

#include "server/fatbin/symbols.h"

#include "api_support.h"

TEST_CASE("each variable that is read of an image is found by the driver") {
  const std::string name = GENERATE("variables.ptx", "variables.relocatable.ptx", "variables.fatbin");
  INFO(name);
  std::ifstream file(std::string(CODE_IMAGES) + "/" + name, std::ios::binary);
  const std::string image((std::istreambuf_iterator<char>(file)), {});
  std::vector<gpupool::fatbin::Symbol> symbols;
  REQUIRE(gpupool::fatbin::readSymbols(std::as_bytes(std::span(image)), 90, symbols));
  REQUIRE(symbols.size() > 19);

  apitest::Session session;
  CUmodule module = nullptr;
  OK(cuModuleLoadData(&module, image.c_str()));
  for (const auto& symbol : symbols) {
    INFO(symbol.name);
    CUdeviceptr address = 0;
    size_t bytes = 0;
    OK(cuModuleGetGlobal(&address, &bytes, module, symbol.name.c_str()));
    CHECK(bytes == symbol.bytes);
  }
  OK(cuModuleUnload(module));
}
