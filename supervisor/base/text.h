#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ipc/base/text.h"

namespace bulkhead::supervisor {

/// One printable line of UTF-8: control characters (C0, DEL, C1), direction overrides and bytes that are no
/// UTF-8 become \n, \t, \xNN or \uNNNN. So nothing a worker prints or a client names can move a cursor,
/// forge a log line or break a JSON document.
[[nodiscard]] std::string escaped(std::string_view text);

/// Escaped, in quotes, as the value of a field in a log line.
[[nodiscard]] std::string in_quotes(std::string_view text);

/// A model's name as a part of a file's name: nothing in it leaves the folder or hides the file.
[[nodiscard]] std::string file_name(std::string_view model);

/// "81,234"
[[nodiscard]] std::string count_text(std::uint64_t count);

/// Milliseconds since 1970, what every surface shows as `time`.
[[nodiscard]] std::int64_t unix_ms();

}  // namespace bulkhead::supervisor
