#include "pool-manager/rest/web.h"

#include <span>

#include "base/embedded.h"

namespace gpupool::pool::rest {

extern const std::span<const EmbeddedFile> kWebPage;  // made by the build

namespace {

// Nothing but the page's own files and this manager's answers: no script in the markup, no other host, no
// frame around it, and no form that a browser would send by itself, its token in the address.
constexpr char kPolicy[] =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'";

const EmbeddedFile* find(const std::vector<std::string>& path) {
  std::string_view name;
  if (path.size() == 1 && path[0].empty()) name = "index.html";
  if (path.size() == 2 && path[0] == "web") name = path[1];
  for (const EmbeddedFile& file : kWebPage)
    if (file.name == name) return &file;
  return nullptr;
}

const char* typeOf(std::string_view name) {
  if (name.ends_with(".html")) return "text/html; charset=utf-8";
  if (name.ends_with(".css")) return "text/css; charset=utf-8";
  if (name.ends_with(".js")) return "text/javascript; charset=utf-8";
  return "image/svg+xml";
}

}  // namespace

bool isOfWebPage(const Request& request) { return find(request.path) != nullptr; }

Answer webFile(const Request& request) {
  if (request.method != kj::HttpMethod::GET)
    refuse({405, "method_not_allowed", "that cannot be done here", "GET, HEAD"});
  const EmbeddedFile& file = *find(request.path);
  const std::string tag = "\"" + std::string(file.sha256.substr(0, 32)) + "\"";
  Answer answer;
  answer.contentType = typeOf(file.name);
  answer.cacheControl = "no-cache";  // kept, and asked for again each time: another manager has another page
  answer.headers = {{"ETag", tag}, {"Content-Security-Policy", kPolicy}, {"Referrer-Policy", "no-referrer"}};
  if (request.known == "*" || request.known.find(tag) != std::string::npos)
    answer.status = 304;
  else
    answer.text.assign(file.bytes.begin(), file.bytes.end());
  return answer;
}

}  // namespace gpupool::pool::rest
