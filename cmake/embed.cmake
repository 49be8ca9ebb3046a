# The source of gpupool_embed (Embed.cmake). Bytes are written as numbers: a file may hold any.
set(arrays "")
set(entries "")
set(number 0)
foreach(name IN LISTS FILES)
  file(READ ${FOLDER}/${name} bytes HEX)
  file(SHA256 ${FOLDER}/${name} digest)
  string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  string(APPEND arrays "constexpr unsigned char kFile${number}[] = {${bytes}};\n")
  string(APPEND entries "    {\"${name}\", \"${digest}\", kFile${number}},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(WRITE ${OUTPUT} "// Made by cmake/embed.cmake.
#include \"base/embedded.h\"

namespace ${NAMESPACE} {
namespace {

${arrays}
constexpr gpupool::EmbeddedFile kFiles[] = {
${entries}};

}  // namespace

extern const std::span<const gpupool::EmbeddedFile> ${ID};
const std::span<const gpupool::EmbeddedFile> ${ID}(kFiles);

}  // namespace ${NAMESPACE}
")
