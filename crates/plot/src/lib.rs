//! Draws the figures of the `anywarp` command and of the lab as SVG: [`bars`], [`lines`] over sizes or rates, and a [`grid`] of small
//! charts.
//!
//! The libraries that are loaded into other programs do not depend on this crate.

use std::io;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::element::{Drawable, PointCollection};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The width of all figures, and the height of a line chart, in pixels.
const WIDTH: u32 = 860;
const HEIGHT: u32 = 430;

/// Dimensions of a bar chart in pixels: the names on the left, the values on the right, a line of text, the space between panels.
const NAMES: i32 = 200;
const VALUES: i32 = 190;
const LINE: i32 = 22;
const GAP: i32 = 26;

/// The width of the legend on the right of a line chart, in pixels.
const LEGEND: u32 = 200;

const TEXT: RGBColor = RGBColor(0x22, 0x22, 0x22);
const NOTE: RGBColor = RGBColor(0x77, 0x77, 0x77);

/// The colours of lines. They repeat from the seventh line on, with markers.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x1b, 0x6c, 0xa8),
    RGBColor(0xc0, 0x39, 0x2b),
    RGBColor(0x27, 0x85, 0x3e),
    RGBColor(0x8e, 0x44, 0xad),
    RGBColor(0xb8, 0x86, 0x0b),
    RGBColor(0x44, 0x44, 0x44),
];

/// A bar, which shows a median with its spread.
#[derive(Debug, Clone)]
pub struct Bar {
    /// The name on the left of the bar.
    pub name: String,
    /// Red, green and blue.
    pub colour: (u8, u8, u8),
    /// The length of the bar.
    pub median: f64,
    /// The lower end of the spread.
    pub least: f64,
    /// The upper end of the spread.
    pub most: f64,
    /// The text on the right of the bar.
    pub value: String,
}

/// A group of bars with a common scale.
#[derive(Debug, Clone)]
pub struct Panel {
    /// The text above the bars on the left.
    pub title: String,
    /// The text above the bars on the right.
    pub note: String,
    /// The bars from top to bottom.
    pub bars: Vec<Bar>,
}

/// Draws panels one below the other, after lines of text.
pub fn bars(head: &[String], panels: &[Panel]) -> io::Result<String> {
    let lines = |panel: &Panel| LINE * (1 + panel.bars.len() as i32) + GAP;
    let top = 16 * head.len() as i32 + 12;
    let height = top + panels.iter().map(lines).sum::<i32>();
    draw(height.unsigned_abs(), |area| {
        for (n, line) in (0..).zip(head) {
            write(area, line, (10, 10 + 16 * n), HPos::Left, 12.0, NOTE)?;
        }
        let mut y = top;
        for panel in panels {
            draw_panel(area, panel, y)?;
            y += lines(panel);
        }
        Ok(())
    })
}

fn draw_panel(area: &Area<'_>, panel: &Panel, top: i32) -> io::Result<()> {
    let right = WIDTH as i32 - 10;
    let title = top + LINE / 2;
    write(area, &panel.title, (10, title), HPos::Left, 14.0, TEXT)?;
    write(area, &panel.note, (right, title), HPos::Right, 12.0, NOTE)?;
    let most = panel.bars.iter().map(|bar| bar.most).fold(0.0, f64::max);
    let x = |value: f64| {
        let part = if most > 0.0 { value / most } else { 0.0 };
        NAMES + (part * f64::from(right - VALUES - NAMES)).round() as i32
    };
    for (n, bar) in (1..).zip(&panel.bars) {
        let middle = top + LINE * n + LINE / 2;
        let half = LINE / 2 - 3;
        let (r, g, b) = bar.colour;
        let length = x(bar.median).max(NAMES + 1);
        let corners = [(NAMES, middle - half), (length, middle + half)];
        put(area, &Rectangle::new(corners, RGBColor(r, g, b).filled()))?;
        let spread = vec![(x(bar.least), middle), (x(bar.most), middle)];
        put(area, &PathElement::new(spread, TEXT))?;
        let name = (NAMES - 8, middle);
        write(area, &bar.name, name, HPos::Right, 12.0, TEXT)?;
        let value = (x(bar.most) + 6, middle);
        write(area, &bar.value, value, HPos::Left, 12.0, TEXT)?;
    }
    Ok(())
}

/// The name of a line, and its value for each x. Values that are not finite are not drawn.
pub type Line<'a> = (&'a str, Vec<f64>);

/// The title and the axes of a line chart.
#[derive(Debug, Clone, Copy)]
pub struct Chart<'a> {
    /// The text above the chart.
    pub title: &'a str,
    /// The unit of the values.
    pub unit: &'a str,
    /// The labels of the x axis.
    pub places: &'a [String],
    /// Whether the scale of the values is logarithmic. Values that are not positive are then not drawn.
    pub log: bool,
    /// Formats a value of the scale.
    pub digits: fn(f64) -> String,
}

/// Draws a line chart. Returns an empty text if there is no value to draw.
pub fn lines(chart: &Chart<'_>, lines: &[Line<'_>]) -> io::Result<String> {
    let shown = |v: f64| v.is_finite() && (!chart.log || v > 0.0);
    let all = lines.iter().flat_map(|(_, values)| values.iter().copied());
    let (least, most) = all
        .filter(|v| shown(*v))
        .fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
    if chart.places.is_empty() || least > most {
        return Ok(String::new());
    }
    draw(HEIGHT, |area| {
        write(area, chart.title, (62, 16), HPos::Left, 15.0, TEXT)?;
        let plot = area.margin(28, 4, 4, LEGEND);
        if chart.log {
            let decade = |v: f64, up: bool| 10_f64.powf(if up { v.ceil() } else { v.floor() });
            let low = decade(least.log10(), false);
            let high = decade(most.log10(), true).max(low * 10.0);
            plot_lines(chart, &plot, (low..high).log_scale(), lines, shown)?;
        } else {
            let high = (most * 1.05).max(f64::MIN_POSITIVE);
            plot_lines(chart, &plot, 0.0..high, lines, shown)?;
        }
        for (n, (name, _)) in lines.iter().enumerate() {
            let (left, y) = ((WIDTH - LEGEND) as i32 + 10, 38 + 16 * n as i32);
            put(
                area,
                &PathElement::new(vec![(left, y), (left + 26, y)], colour(n)),
            )?;
            if let Some(mark) = marker((left + 13, y), n) {
                put(area, &mark)?;
            }
            write(area, name, (left + 32, y), HPos::Left, 12.0, TEXT)?;
        }
        Ok(())
    })
}

fn plot_lines<S>(
    chart: &Chart<'_>,
    area: &Area<'_>,
    scale: S,
    lines: &[Line<'_>],
    shown: impl Fn(f64) -> bool,
) -> io::Result<()>
where
    S: AsRangedCoord<Value = f64>,
    S::CoordDescType: ValueFormatter<f64>,
{
    let last = (chart.places.len() - 1).max(1);
    let mut context = ChartBuilder::on(area)
        .x_label_area_size(26)
        .y_label_area_size(58)
        .build_cartesian_2d(0..last, scale)
        .map_err(io::Error::other)?;
    context
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(12)
        .x_label_formatter(&|n| chart.places.get(*n).cloned().unwrap_or_default())
        .y_label_formatter(&|v| (chart.digits)(*v))
        .y_desc(chart.unit)
        .draw()
        .map_err(io::Error::other)?;
    for (n, (_, values)) in lines.iter().enumerate() {
        let points = || {
            let all = values.iter().copied().enumerate();
            all.filter(|(_, v)| shown(*v))
        };
        let series = LineSeries::new(points(), colour(n).stroke_width(2));
        context.draw_series(series).map_err(io::Error::other)?;
        let marks = points().filter_map(|at| marker(at, n));
        context.draw_series(marks).map_err(io::Error::other)?;
    }
    Ok(())
}

/// A value with its spread.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// The position of the mark.
    pub median: f64,
    /// The lower end of the spread.
    pub least: f64,
    /// The upper end of the spread.
    pub most: f64,
    /// Whether the mark is empty, which shows that the value is not reliable.
    pub doubtful: bool,
}

/// One line of a small chart.
#[derive(Debug, Clone)]
pub struct Series {
    /// The index of the line's name in the legend.
    pub style: usize,
    /// The value for each x, if there is one.
    pub values: Vec<Option<Spread>>,
}

/// One of several small charts with common scales.
#[derive(Debug, Clone)]
pub struct Small {
    /// The text above the chart.
    pub title: String,
    /// The lines of the chart.
    pub series: Vec<Series>,
}

/// The axes and the legend of all charts of a grid.
#[derive(Debug, Clone, Copy)]
pub struct Grid<'a> {
    /// The unit of the values.
    pub unit: &'a str,
    /// The name of the x axis.
    pub across: &'a str,
    /// The labels of the x axis.
    pub places: &'a [String],
    /// The names of the lines.
    pub legend: &'a [String],
    /// Whether the scale of the values is logarithmic. Values that are not positive are then not drawn.
    pub log: bool,
    /// Formats a value of the scale.
    pub digits: fn(f64) -> String,
}

/// The most lines that can be distinguished by colour and mark.
pub const STYLES: usize = 7;

/// Colours that most people can distinguish (those of Okabe and Ito, without yellow).
const SAFE: [RGBColor; STYLES] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0x00, 0x00, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xe6, 0x9f, 0x00),
];

/// The size in pixels of a small chart.
const SMALL: (u32, u32) = (WIDTH / 2, 270);
/// The height in pixels of a chart that is alone in its grid.
const ALONE: u32 = 340;

/// Draws charts with common scales in two columns, with one legend. Returns an empty text if there is no value to draw.
pub fn grid(grid: &Grid<'_>, charts: &[Small]) -> io::Result<String> {
    let shown = |v: f64| v.is_finite() && (!grid.log || v > 0.0);
    let all = charts
        .iter()
        .flat_map(|chart| &chart.series)
        .flat_map(|series| series.values.iter().flatten())
        .map(|spread| spread.median);
    let (least, most) = all
        .filter(|v| shown(*v))
        .fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
    if grid.places.is_empty() || least > most {
        return Ok(String::new());
    }
    let places = legend_places(grid.legend);
    let top = places.last().map_or(0, |(_, y)| y + 22).unsigned_abs();
    let columns = if charts.len() > 1 { 2 } else { 1 };
    let rows = charts.len().div_ceil(columns);
    let height = if columns == 1 { ALONE } else { SMALL.1 };
    draw(top + height * rows as u32, |area| {
        for (n, (name, (x, y))) in grid.legend.iter().zip(places).enumerate() {
            let line = PathElement::new(vec![(x, y), (x + 26, y)], safe(n).stroke_width(2));
            put(area, &line)?;
            mark(area, (x + 13, y), n, false)?;
            write(area, name, (x + 32, y), HPos::Left, 12.0, TEXT)?;
        }
        let (_, below) = area.split_vertically(top);
        for (chart, place) in charts.iter().zip(below.split_evenly((rows, columns))) {
            write(&place, &chart.title, (62, 10), HPos::Left, 13.0, TEXT)?;
            // The last label is centred below the right end of the axis.
            let last = grid.places.last().map_or(0, |name| name.chars().count());
            let inner = place.margin(18, 4, 4, (4 * last as i32 + 4).max(20));
            if grid.log {
                let step = |v: f64, up: bool| {
                    let power = v.log10();
                    10_f64.powf(if up { power.ceil() } else { power.floor() })
                };
                let low = step(least, false);
                let high = step(most, true).max(low * 10.0);
                small(grid, &inner, (low..high).log_scale(), &chart.series, shown)?;
            } else {
                let high = (most * 1.05).max(f64::MIN_POSITIVE);
                small(grid, &inner, 0.0..high, &chart.series, shown)?;
            }
        }
        Ok(())
    })
}

/// Returns the positions of the names in the legend, in as many rows as needed.
fn legend_places(legend: &[String]) -> Vec<(i32, i32)> {
    let (mut x, mut y) = (10, 12);
    legend
        .iter()
        .map(|name| {
            let width = 50 + 7 * name.chars().count() as i32;
            if x > 10 && x + width > WIDTH as i32 {
                (x, y) = (10, y + 18);
            }
            let place = (x, y);
            x += width;
            place
        })
        .collect()
}

fn small<S>(
    grid: &Grid<'_>,
    area: &Area<'_>,
    scale: S,
    series: &[Series],
    shown: impl Fn(f64) -> bool,
) -> io::Result<()>
where
    S: AsRangedCoord<Value = f64>,
    S::CoordDescType: ValueFormatter<f64>,
{
    let last = (grid.places.len() - 1).max(1);
    let mut context = ChartBuilder::on(area)
        .x_label_area_size(38)
        .y_label_area_size(62)
        .build_cartesian_2d(0..last, scale)
        .map_err(io::Error::other)?;
    context
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(8)
        .x_label_formatter(&|n| grid.places.get(*n).cloned().unwrap_or_default())
        .y_label_formatter(&|v| (grid.digits)(*v))
        .x_desc(grid.across)
        .y_desc(grid.unit)
        .draw()
        .map_err(io::Error::other)?;
    let plot = context.plotting_area();
    let range = plot.get_pixel_range();
    let inside = |y: i32| y.clamp(range.1.start, range.1.end);
    for line in series {
        let points: Vec<((i32, i32), Spread)> = line
            .values
            .iter()
            .enumerate()
            .filter_map(|(n, spread)| Some((n, (*spread)?)))
            .filter(|(_, spread)| shown(spread.median))
            .map(|(n, spread)| (plot.map_coordinate(&(n, spread.median)), spread))
            .collect();
        let whole = area.strip_coord_spec();
        let (left, upper) = whole.get_base_pixel();
        let at = |(x, y): (i32, i32)| (x - left, inside(y) - upper);
        let path: Vec<(i32, i32)> = points.iter().map(|(place, _)| at(*place)).collect();
        let style = safe(line.style).stroke_width(2);
        put(&whole, &PathElement::new(path, style))?;
        for (n, spread) in line.values.iter().enumerate() {
            let Some(spread) = spread.filter(|spread| shown(spread.median)) else {
                continue;
            };
            let place = |v: f64| {
                let v = if shown(v) { v } else { spread.median };
                at(plot.map_coordinate(&(n, v)))
            };
            let ends = vec![place(spread.least), place(spread.most)];
            put(&whole, &PathElement::new(ends, safe(line.style)))?;
            mark(&whole, place(spread.median), line.style, spread.doubtful)?;
        }
    }
    Ok(())
}

fn safe(line: usize) -> RGBColor {
    *SAFE.get(line % STYLES).unwrap_or(&BLACK)
}

/// Draws the mark of a line at a point. Its shape distinguishes lines without colours.
fn mark(area: &Area<'_>, (x, y): (i32, i32), line: usize, empty: bool) -> io::Result<()> {
    let colour = safe(line);
    let style = if empty {
        colour.stroke_width(1)
    } else {
        colour.filled()
    };
    let around = |corners: &[(i32, i32)]| corners.iter().map(|(a, b)| (x + a, y + b)).collect();
    let corners: Vec<(i32, i32)> = match line % STYLES {
        0 => return put(area, &Circle::new((x, y), 3, style)),
        1 => around(&[(-4, 3), (4, 3), (0, -4)]),
        2 => around(&[(-3, -3), (3, -3), (3, 3), (-3, 3)]),
        3 => around(&[(0, -4), (4, 0), (0, 4), (-4, 0)]),
        4 => around(&[(-4, -3), (4, -3), (0, 4)]),
        5 => around(&[(-4, -1), (4, -1), (4, 1), (-4, 1)]),
        _ => around(&[(-1, -4), (1, -4), (1, 4), (-1, 4)]),
    };
    if empty {
        let closed: Vec<(i32, i32)> = corners.iter().chain(corners.first()).copied().collect();
        return put(area, &PathElement::new(closed, style));
    }
    put(area, &Polygon::new(corners, style))
}

fn colour(line: usize) -> RGBColor {
    *COLOURS.get(line % COLOURS.len()).unwrap_or(&BLACK)
}

/// Returns the marker for a point of a line whose colour is used by an earlier line too.
fn marker<C>(at: C, line: usize) -> Option<Circle<C, i32>> {
    let repeated = line / COLOURS.len();
    let style = match repeated {
        0 => return None,
        1 => colour(line).filled(),
        _ => colour(line).stroke_width(1),
    };
    Some(Circle::new(at, 3, style))
}

/// Draws the content on a white area.
fn draw(height: u32, content: impl FnOnce(&Area<'_>) -> io::Result<()>) -> io::Result<String> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE).map_err(io::Error::other)?;
    content(&area)?;
    area.present().map_err(io::Error::other)?;
    drop(area);
    Ok(svg)
}

fn put<'a, 'b, E>(area: &Area<'b>, element: &'a E) -> io::Result<()>
where
    &'a E: PointCollection<'a, (i32, i32)>,
    E: Drawable<SVGBackend<'b>>,
{
    area.draw(element).map_err(io::Error::other)
}

fn write(
    area: &Area<'_>,
    text: &str,
    at: (i32, i32),
    side: HPos,
    size: f64,
    colour: RGBColor,
) -> io::Result<()> {
    let style = TextStyle::from(("sans-serif", size).into_font())
        .color(&colour)
        .pos(Pos::new(side, VPos::Center));
    area.draw_text(text, &style, at).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digits(v: f64) -> String {
        format!("{v:.0}")
    }

    fn figure(log: bool, lines: &[Line<'_>]) -> String {
        let places = ["1 B".to_owned(), "2 B".to_owned()];
        let chart = Chart {
            title: "title",
            unit: "MB/s",
            places: if lines.is_empty() { &[] } else { &places },
            log,
            digits,
        };
        super::lines(&chart, lines).unwrap()
    }

    #[test]
    fn each_line_and_place_is_drawn() {
        let lines = [("one", vec![1.0, 1000.0]), ("two", vec![f64::NAN, 10.0])];
        for log in [true, false] {
            let svg = figure(log, &lines);
            for text in ["one", "two", "1 B", "2 B", "title", "MB/s", "1000"] {
                assert!(svg.contains(text), "{text}: {svg}");
            }
        }
        assert_eq!(figure(true, &[]), "");
        assert_eq!(figure(true, &[("nothing", vec![0.0, f64::NAN])]), "");
    }

    #[test]
    fn the_seventh_line_has_a_marker_in_the_legend_and_at_each_value() {
        let marks = |lines: &[Line<'_>]| figure(true, lines).matches("<circle").count();
        let mut lines: Vec<Line<'_>> = (0..7).map(|_| ("line", vec![1.0, 2.0])).collect();
        assert_eq!(marks(&lines[..6]), 0);
        assert_eq!(marks(&lines), 3);
        for missing in [f64::NAN, 0.0] {
            lines[6].1[0] = missing;
            assert_eq!(marks(&lines), 2, "{missing}");
        }
    }

    #[test]
    fn small_charts_share_a_legend_and_each_value_has_a_mark() {
        let spread = |median: f64, doubtful| {
            Some(Spread {
                median,
                least: median / 2.0,
                most: median * 2.0,
                doubtful,
            })
        };
        let places = ["1".to_owned(), "2".to_owned()];
        let legend = ["poll".to_owned(), "a<b".to_owned()];
        let charts = ["first", "second"].map(|title| Small {
            title: title.to_owned(),
            series: vec![
                Series {
                    style: 0,
                    values: vec![spread(1.0, false), spread(10.0, true)],
                },
                Series {
                    style: 1,
                    values: vec![None, spread(5.0, false)],
                },
            ],
        });
        for log in [false, true] {
            let grid = Grid {
                unit: "µs",
                across: "buffers",
                places: &places,
                legend: &legend,
                log,
                digits,
            };
            let svg = super::grid(&grid, &charts).unwrap();
            for text in ["first", "second", "poll", "a&lt;b", "buffers", "µs"] {
                assert!(svg.contains(text), "{text}: {svg}");
            }
            // The first line has a circle in the legend and two in each chart. The second line has a triangle in the legend and
            // one in each chart.
            assert_eq!(svg.matches("<circle").count(), 5);
            assert_eq!(svg.matches("<polygon").count(), 3);
            assert_eq!(super::grid(&grid, &[]).unwrap(), "");
        }
    }

    #[test]
    fn bars_are_scaled_by_the_largest_value_and_text_is_escaped() {
        let bar = |name: &str, value: f64| Bar {
            name: name.to_owned(),
            colour: (1, 2, 3),
            median: value,
            least: value,
            most: value,
            value: value.to_string(),
        };
        let panel = Panel {
            title: "w, µs".to_owned(),
            note: String::new(),
            bars: vec![bar("a<b", 4.0), bar("half", 2.0), bar("none", 0.0)],
        };
        let svg = bars(&["head".to_owned()], &[panel]).unwrap();
        assert!(svg.contains("a&lt;b") && !svg.contains("a<b"));
        let full = WIDTH as i32 - 10 - VALUES - NAMES;
        for width in [full, full / 2, 1] {
            assert!(
                svg.contains(&format!("width=\"{width}\"")),
                "{width}: {svg}"
            );
        }
    }
}
