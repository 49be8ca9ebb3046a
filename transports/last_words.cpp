#include "transports/last_words.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "transports/bootstrap.h"

namespace gpupool::transport {
namespace {

constexpr size_t kMostText = 255;

}  // namespace

void sayLastWords(int socket, const std::string& text) {
  const Record record{.kind = RecordKind::lastWords, .size = std::min(text.size(), kMostText)};
  std::byte message[sizeof record + kMostText];
  std::memcpy(message, &record, sizeof record);
  std::memcpy(message + sizeof record, text.data(), record.size);
  // At once, or not at all: the socket of a client that is stopped may be full.
  [[maybe_unused]] const ssize_t sent =
      ::send(socket, message, sizeof record + record.size, MSG_DONTWAIT | MSG_NOSIGNAL);
}

std::string plainWords(std::string reason) {
  for (const std::string_view beginning : {kFailoverWords, kLeavingWords})
    if (reason.starts_with(beginning)) return reason.substr(beginning.size());
  return reason;
}

void LastWords::take(std::span<const std::byte> bytes) {
  if (said_.empty())
    bytes = bytes.subspan(static_cast<size_t>(
        std::find_if(bytes.begin(), bytes.end(), [](std::byte one) { return one != kBeatByte; }) -
        bytes.begin()));
  const size_t room = sizeof(Record) + kMostText - said_.size();
  bytes = bytes.first(std::min(bytes.size(), room));
  said_.insert(said_.end(), bytes.begin(), bytes.end());
}

std::string LastWords::text() const {
  Record record;
  if (said_.size() < sizeof record) return "";
  std::memcpy(&record, said_.data(), sizeof record);
  if (record.kind != RecordKind::lastWords || record.size > said_.size() - sizeof record) return "";
  std::string text(reinterpret_cast<const char*>(said_.data()) + sizeof record, record.size);
  // It ends up on a terminal.
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

}  // namespace gpupool::transport
