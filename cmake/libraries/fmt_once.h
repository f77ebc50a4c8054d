// Included first by all that links fmt_archive, which has this function: with what it needs it takes
// 2 s to compile, and 50 kB, in each file that formats or logs.
#pragma once

#include <fmt/format.h>

extern template void fmt::detail::vformat_to(
    buffer<char>&, string_view, basic_format_args<buffer_context<char>>, locale_ref);
