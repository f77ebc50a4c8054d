// Included first in everything that links fmt_archive, which holds this function. Compiled in each
// file that formats or logs, it would cost 2 s and 50 kB.
#pragma once

#include <fmt/format.h>

extern template void fmt::detail::vformat_to(
    buffer<char>&, string_view, basic_format_args<buffer_context<char>>, locale_ref);
