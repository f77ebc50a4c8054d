// Compiles Boost.JSON once from its headers: Debian's library package is then not
// needed at run time.
#include <boost/json/src.hpp>
