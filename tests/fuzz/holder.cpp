// The datagrams between a client library and its lease holder, both ways.
//
// Input: u8 bit 0: to the client, else to the holder; u16 length of the datagram as received; its bytes.
#include <algorithm>
#include <cstring>

#include "client/holder.h"
#include "pool-manager/cli/holder.h"
#include "tests/fuzz/input.h"

namespace {

using namespace gpupool;
using fuzz::Input;
using fuzz::touch;

void toClient(std::span<const std::byte> datagram, ssize_t bytes) {
  client::OpenedSession opened;
  std::memcpy(&opened.reply, datagram.data(), std::min(datagram.size(), sizeof opened.reply));
  std::string text;
  if (client::acceptReply(opened, bytes, text) != CUDA_SUCCESS) return;
  auto ends = [](const auto& field) { return std::memchr(field, 0, sizeof field) != nullptr; };
  const auto& reply = opened.reply;
  if (!ends(reply.text) || !ends(reply.transport) || !ends(reply.networkDevice) || !ends(reply.server))
    __builtin_trap();
}

void toHolder(std::span<const std::byte> datagram, ssize_t bytes) {
  holder::OpenRequest request;
  std::memcpy(&request, datagram.data(), std::min(datagram.size(), sizeof request));
  if (auto failure = cli::check(request, bytes)) {
    touch(failure->text.data(), failure->text.size());
    return;
  }
  const auto wish = cli::wishOf(request);
  if (wish.transport.size() > sizeof request.transport || wish.command.size() > sizeof request.command)
    __builtin_trap();
  for (char c : wish.command)
    if (static_cast<unsigned char>(c) < ' ') __builtin_trap();  // people read it in their terminals
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const bool client = (input.value<uint8_t>() & 1) != 0;
  const auto bytes = input.value<uint16_t>();
  client ? toClient(input.all(), bytes) : toHolder(input.all(), bytes);
  return 0;
}
