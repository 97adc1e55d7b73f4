#pragma once

/// The version of shoestring. The build, the wheel and Python read it from here.
#define SHOESTRING_VERSION "0.1.0"
