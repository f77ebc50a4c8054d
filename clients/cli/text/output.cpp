#include "clients/cli/text/output.h"

#include <cerrno>
#include <cstdio>

#include "clients/cli/text/json_access.h"
#include "ipc/base/error.h"

namespace bulkhead::cli {

int print(std::string_view text) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
        throw ErrorException{system_error("writing to standard output", errno)};
    return 0;
}

int print_json(const boost::json::value& document) { return print(json_text(document) + "\n"); }

}  // namespace bulkhead::cli
